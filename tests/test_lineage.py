from areal_q.messages import VersionSpan
from learner.lineage import Lineage


def test_lag_in_one_history_is_the_difference_of_versions():
    lineage = Lineage(keep=4)
    for version, digest in enumerate("abcd"):
        lineage.published(version, digest)
    assert [lineage.lag(VersionSpan(v, 1, d), 3) for v, d in enumerate("abcd")] == [3, 2, 1, 0]


def test_a_token_of_an_abandoned_history_is_as_far_as_the_way_over_the_fork():
    # Versions 0 1 2 3 4 were published; the learner crashed and resumed from a checkpoint at 2.
    lineage = Lineage(keep=4, digests={1: "b", 2: "c"}, fork=2)
    lineage.published(3, "d'")
    lineage.published(4, "e'")
    assert lineage.lag(VersionSpan(4, 1, "e"), now=4) == (4 - 2) + (4 - 2)
    assert lineage.lag(VersionSpan(3, 1, "d"), now=2) == 1
    assert lineage.lag(VersionSpan(4, 1, "e'"), now=5) == 1
    assert lineage.lag(VersionSpan(2, 1, "c"), now=4) == 2


def test_weights_that_were_never_published_are_as_old_as_can_be():
    lineage = Lineage(keep=4, digests={6: "g", 7: "h"}, fork=5)
    assert lineage.lag(VersionSpan(5, 1, "foreign"), now=7) == 4
    assert lineage.lag(VersionSpan(1, 1, "forgotten"), now=7) == 6


def test_only_the_newest_digests_are_kept():
    lineage = Lineage(keep=3)
    for version in range(100):
        lineage.published(version, str(version))
    assert sorted(lineage.digests) == [97, 98, 99]
