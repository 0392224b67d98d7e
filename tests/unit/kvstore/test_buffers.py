from hypothesis import given
from hypothesis import strategies as st

from kvstore.buffers import IOV_MAX, BufferRun


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 50), st.data())
def test_all_bytes_come_once_and_in_order(sizes, limit, data):
    whole = bytes(index % 251 for index in range(sum(sizes)))
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    run = BufferRun(memoryview(whole)[end - size : end] for end, size in zip(ends, sizes, strict=True))
    taken = b""
    while run.left:
        front = b"".join(run.front(limit))
        assert 0 < len(front) <= limit
        count = data.draw(st.integers(0, len(front)) if len(front) > 1 else st.just(1))
        taken += front[:count]
        run.advance(count)
        assert run.left == len(whole) - len(taken)
    assert taken == whole
    assert run.front(limit) == []


def test_front_returns_at_most_iov_max_buffers():
    run = BufferRun(memoryview(b"x") for _ in range(IOV_MAX + 5))

    assert len(run.front(run.left)) == IOV_MAX
    run.advance(IOV_MAX)
    assert len(run.front(run.left)) == 5
