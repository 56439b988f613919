from dataclasses import dataclass


@dataclass
class PlacementGroup:
    bundles: list[dict[str, int]]
    strategy: str

    def ready(self) -> None: ...


def placement_group(bundles: list[dict[str, int]], strategy: str) -> PlacementGroup:
    return PlacementGroup(bundles, strategy)
