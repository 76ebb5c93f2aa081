"""`find_micro_size` on several processes: one answer, and one error."""

PART, SIZES = "micro_size_worker", (2,)


def test_the_ranks_have_the_largest_of_their_answers(two):
    assert two[0]["probes"] == [[1, True]]
    fitting = min(count for count, fits in two[1]["probes"] if fits)
    assert fitting > 1 and [report["answer"] for report in two] == [fitting] * 2


def test_a_rank_that_fails_fails_on_all(two):
    error = (
        "For 'find_micro_size', the training must run, but with micro_size=1 got ArithmeticError: the network's own "
        "error"
    )
    refused = (
        "For 'find_micro_size', the argument 'build' must be a function, 'file.py:function' or 'module:function', but "
        "got 'no function'. For example 'train.py:build'."
    )
    assert two[1]["child fails"] == f"RuntimeError: {error}" and two[1]["refused"] == f"ValueError: {refused}"
    assert two[0]["child fails"] == f"RuntimeError: Rank 1 has failed. {error}"
    assert two[0]["refused"] == f"ValueError: Rank 1 has failed. {refused}"
    assert [report["after"] for report in two] == [[0, 1]] * 2
