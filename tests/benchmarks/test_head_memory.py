from benchmarks import head_memory


def test_a_head_is_in_memory_once() -> None:
    found = head_memory.measure("1b")
    assert found["held"] > 0.9 * found["file"]
    assert found["peak"] < 1.1 * found["file"]
