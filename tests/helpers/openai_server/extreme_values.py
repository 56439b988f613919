"""Values at and beyond the bounds of a request's fields, for hypothesis."""

from typing import Any

from hypothesis import strategies as st
from msgspec import inspect as types

from rollout.openai_server.schema import MAX_STOP_IDS

NUMBERS = (
    0,
    -1,
    1,
    2,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
)
FLOATS = (0.0, -0.0, 1.0, 1e-320, 1e-9, 0.999999, 1e15, 1e16, 1e308, -1e308)
TEXTS = (
    "",
    "1+2=",
    "=" * 2000,
    "\0",
    "é",
    "\ud800".encode("utf-16", "surrogatepass").decode("latin1"),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(TEXTS),
)
LISTS = st.one_of(
    st.lists(SCALARS, max_size=4),
    st.sampled_from([MAX_STOP_IDS, MAX_STOP_IDS + 1, 5000]).map(lambda n: list(range(n))),
    st.sampled_from([5, 65, 5000]).map(lambda n: [f"{i}" for i in range(n)]),
)
ANYTHING = st.one_of(SCALARS, LISTS, st.dictionaries(st.sampled_from(TEXTS), SCALARS, max_size=2))


def values_of(kind: types.Type) -> st.SearchStrategy[Any]:
    """Values at and beyond the bounds of `kind`, and some of another type."""
    match kind:
        case types.Metadata():
            return values_of(kind.type)
        case types.UnionType():
            return st.one_of([values_of(member) for member in kind.types])
        case types.IntType() | types.FloatType():
            bounds = [b for b in (kind.ge, kind.gt, kind.le, kind.lt) if b is not None]
            return st.sampled_from(
                [*NUMBERS, *FLOATS, *(b + d for b in bounds for d in (-1, 0, 1))]
            )
        case types.ListType():
            longest = kind.max_length or 0
            sizes = [n for n in (0, 1, longest, longest + 1) if n < 10_000]
            item = values_of(kind.item_type)
            return (
                st.tuples(st.sampled_from(sizes), item).map(lambda made: [made[1]] * made[0])
                | LISTS
            )
        case _:
            return ANYTHING


def bodies(schema: type) -> st.SearchStrategy[dict[str, Any]]:
    """One to three fields of `schema`, with such values."""
    described = types.type_info(schema)
    assert isinstance(described, types.StructType)
    fields = {field.name: values_of(field.type) | ANYTHING for field in described.fields}
    names = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True)
    changed = names.flatmap(
        lambda some: st.fixed_dictionaries({name: fields[name] for name in some})
    )
    return changed
