"""Where a worker's weights come from: the learner, or a relay that it was told of."""

from dataclasses import dataclass

from buffer.weight_sync.curve import CLIENT, ClientKeys, client_keys


@dataclass(frozen=True)
class Source:
    """What the command line says; None leaves it to the learner and the settings."""

    announce: str | None = None
    fetch: str | None = None
    keys: str | None = None
    """Directory of CURVE keys on this machine"""
    client: str = CLIENT
    """Whose key in it"""

    def endpoints(self, learner: dict[str, str]) -> tuple[str, str]:
        """(announce, fetch), given what the learner wrote into Redis."""
        return self.announce or learner["announce"], self.fetch or learner["fetch"]

    def load_keys(self, configured: str | None) -> ClientKeys | None:
        """Raises ConfigError naming a key that cannot be used."""
        directory = self.keys or configured
        return client_keys(directory, self.client) if directory else None
