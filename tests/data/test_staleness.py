from hypothesis import given
from hypothesis import strategies as st

from areal_q.messages import VersionSpan
from learner.data.staleness import VersionHistory, forks_at


def test_lag_in_one_history_is_the_difference_of_versions():
    history = VersionHistory(keep=4)
    for version, digest in enumerate("abcd"):
        history.add(version, digest)
    assert [history.lag(VersionSpan(v, 1, d), 3) for v, d in enumerate("abcd")] == [3, 2, 1, 0]


def test_token_of_an_abandoned_history_counts_over_the_fork():
    # Versions 0 1 2 3 4 were published; the learner crashed and resumed from a checkpoint at 2.
    history = VersionHistory(keep=4, digests={1: "b", 2: "c"}, forks=[2])
    history.add(3, "d'")
    history.add(4, "e'")
    assert history.lag(VersionSpan(4, 1, "e"), now=4) == (4 - 2) + (4 - 2)
    assert history.lag(VersionSpan(3, 1, "d"), now=2) == 1
    assert history.lag(VersionSpan(4, 1, "e'"), now=5) == 1
    assert history.lag(VersionSpan(2, 1, "c"), now=4) == 2


def test_weights_that_were_never_published_are_as_old_as_can_be():
    history = VersionHistory(keep=4, digests={6: "g", 7: "h"}, forks=[5])
    assert history.lag(VersionSpan(5, 1, "foreign"), now=7) == 4
    assert history.lag(VersionSpan(1, 1, "forgotten"), now=7) == 6


def test_a_forgotten_version_is_as_old_as_its_number_says():
    """A group of version 540 was once said to lag 490 versions behind 550, counted over a fork at 300."""
    history = VersionHistory(keep=4, digests={v: str(v) for v in range(547, 551)}, forks=[300])
    assert history.lag(VersionSpan(540, 1, "540"), now=550) == 10
    assert history.lag(VersionSpan(546, 1, "546"), now=550) == 4
    assert history.lag(VersionSpan(548, 1, "abandoned"), now=550) == (548 - 300) + (550 - 300)


def test_only_the_newest_digests_are_kept():
    history = VersionHistory(keep=3)
    for version in range(100):
        history.add(version, str(version))
    assert sorted(history.digests) == [97, 98, 99]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=5), st.integers(2, 5))
def test_over_any_crashes_no_token_passes_for_newer_than_it_is(
    crashes: list[tuple[int, int]], keep: int
):
    """Each crash: so many versions published since the last start, and how many of them it loses."""
    now = 0
    forks: list[int] = []
    abandoned: list[tuple[int, int]] = []  # (version, where its history left ours)
    history = VersionHistory(keep)
    history.add(0, "0.0")
    for life, (published, lost) in enumerate(crashes, start=1):
        top = now + published
        for version in range(now + 1, top + 1):
            history.add(version, f"{life}.{version}")
        start = max(now, top - lost)  # a checkpoint stood there
        # Nothing that a crash left unread is older than the bound for long: only those are still about.
        abandoned = [(v, min(f, start)) for v, f in abandoned if start - f < keep]
        abandoned += [(v, start) for v in range(start + 1, top + 1)]
        digests = {v: d for v, d in history.digests.items() if v <= start}
        forks = forks_at(start, forks, keep)
        history, now = VersionHistory(keep, digests, forks), start
        for ahead in range(keep):
            for version, left in abandoned:
                way = (version - left) + (now + ahead - left)
                span = VersionSpan(version, 1, "of another history")
                assert min(history.lag(span, now + ahead), keep) >= min(way, keep)


def test_only_forks_within_the_bound_matter():
    assert forks_at(2, [], keep=4) == [2]
    assert forks_at(4, [2], keep=4) == [2, 4]
    assert forks_at(6, [2, 4], keep=4) == [4, 6]
    assert forks_at(50, [4, 6], keep=4) == [50]
