"""Segments: whatever is cached, batched, drafted or cut, the logits are those of BlockModel within 1e-5 of the
largest (fp32)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.kv_cache import common_prefix
from blocktrain.serve.segment import segment as segment_module
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.sampling import log_likelihood
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.segment.sessions import parts_within
from blocktrain.serve.traversal import CacheMiss, Draft, Noise, Piece, Traversal, Verify, Weigh

TOLERANCE = 1e-5
CUTS = [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2], [3]], [[0], [1], [2], [3]]]
TEXT = bytes(torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(7)).tolist())
TAILS = torch.randint(0, 256, (3, 7), generator=torch.Generator().manual_seed(8)).to(torch.uint8)


def truth(model, text, missing=()):
    """[T, 256] of the whole text at once."""
    path = model.paths[0]
    return model.combined(model.readings(torch.tensor([list(text)]), path, missing=missing), path)[0]


def assert_close(got, expected):
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < TOLERANCE * max(1, expected.abs().max())


def assert_right(model, reply, missing=()):
    """Every logit of a reply against the model's."""
    read, length = len(reply.prompt_logits), len(reply.prompt)
    assert_close(reply.prompt_logits, truth(model, reply.prompt, missing)[-read:])
    if reply.tails is not None:
        for tail, logits in zip(reply.tails, reply.tail_logits, strict=True):
            assert_close(logits, truth(model, reply.prompt + bytes(tail.tolist()), missing)[length:])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_into_segments_gives_the_model_s_logits(model, segments, kind, cut, weighted):
    whole = model(kind, weighted)
    forward = LocalForward(*segments(whole, cut))
    assert_right(whole, forward.run(Traversal("s", TEXT[:20], read=5)))
    assert_right(whole, forward.run(Traversal("s", TEXT[:30], start=20, read=3, tails=TAILS[:1])))
    assert_right(whole, forward.run(Traversal("s", TEXT[:33], start=30, tails=TAILS)))
    assert_right(whole, forward.run(Traversal("s", TEXT[:33], start=32, draft=Draft(9, candidates=4, seed=1))))


steps = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6
)


@settings(max_examples=15)
@given(steps)
def test_no_history_of_a_session_changes_its_logits(model, segments, steps):
    """Prompts that grow, shrink and change, with tails of one row or several, and drafts between them."""
    whole = model("stacked")
    forward = LocalForward(*segments(whole, [[0, 1], [2, 3]]))
    cached = b""
    for length, rows, other, drafted in steps:
        text = (TEXT if not other else TEXT[:25] + TEXT[::-1])[:length]
        start = min(common_prefix(cached, text), length - 1)
        what = {"draft": Draft(drafted, 1)} if not rows else {"tails": TAILS[:rows]}
        reply = forward.run(Traversal("s", text, start=start, **what))
        assert_right(whole, reply)
        cached = text


def test_sessions_in_one_batch_get_what_each_gets_alone(model, segments, kind):
    """Different pasts, numbers of new positions, tails, drafts and missing blocks, in one call."""
    batch = [
        Traversal("a", TEXT[:30], start=25),
        Traversal("b", TEXT[10:50], read=4, tails=TAILS),
        Traversal("c", TEXT[5:12], draft=Draft(4, candidates=3, seed=2)),
        Traversal("d", TEXT[:40], draft=Draft(6, candidates=1, seed=2, temperature=0.5, top_p=0.8)),
        Traversal("e", TEXT[3:9], tails=TAILS[:1], missing=(2,)),
        Traversal("a", TEXT[:31], start=30),
    ]
    (together,), (alone,) = (segments(model(kind), [[0, 1, 2, 3]]) for _ in range(2))
    for segment in (together, alone):
        segment.advance([Traversal("a", TEXT[:25])])
    for reply, each in zip(together.advance(batch), batch, strict=True):
        (by_itself,) = alone.advance([each])
        assert_right(model(kind), reply, each.missing)
        assert_close(reply.prompt_logits, by_itself.prompt_logits)
        assert reply.tails is by_itself.tails or torch.equal(reply.tails, by_itself.tails)


def test_what_is_cached_is_not_computed_again(model, segments, monkeypatch):
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]])
    sizes = []
    inner = segment._modules[0].step
    monkeypatch.setattr(segment._modules[0], "step", lambda b, *rest: sizes.append(len(b)) or inner(b, *rest))
    segment.advance([Traversal("s", TEXT[:20])])
    segment.advance([Traversal("s", TEXT[:24], start=20, tails=TAILS[:1])])
    accepted = TEXT[:24] + bytes(TAILS[0, :3].tolist())
    segment.advance([Traversal("s", accepted + b"x", start=27)])
    assert sizes == [20, 4 + 7, 1]


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 1), (2, 3), (0, 2)])
def test_a_traversal_does_without_missing_blocks_as_the_model_does(model, segments, kind, missing):
    forward = LocalForward(*segments(model(kind), [[0, 1], [2, 3]]))
    forward.run(Traversal("s", TEXT[:20]))  # with all blocks: what it left behind must not be used
    reply = forward.run(Traversal("s", TEXT[:24], start=20, missing=missing, tails=TAILS))
    assert reply.degraded
    assert_right(model(kind), reply, missing)


def test_a_first_segment_rebuilds_its_cache_from_the_bytes(model, segments):
    first, rest = segments(model("stacked"), [[0, 1], [2, 3]])
    forward = LocalForward(first, rest)
    forward.run(Traversal("s", TEXT[:20]))
    first.forget("s")
    assert_right(model("stacked"), forward._attempt(Traversal("s", TEXT[:24], start=20)))


def test_a_later_segment_without_its_cache_says_so_and_a_second_attempt_succeeds(model, segments):
    first, rest = segments(model("stacked"), [[0, 1], [2, 3]])
    forward = LocalForward(first, rest)
    forward.run(Traversal("s", TEXT[:20]))
    rest.forget("s")
    traversal = Traversal("s", TEXT[:24], start=20)
    (missed,) = rest.advance(first.advance([traversal]))
    assert isinstance(missed, CacheMiss)
    assert (missed.start, missed.have) == (20, 0)
    assert_right(model("stacked"), forward.run(traversal))


def test_a_segment_of_independent_blocks_never_misses(model, segments):
    _, rest = segments(model("spans"), [[0, 1], [2, 3]])
    (reply,) = rest.advance([Traversal("s", TEXT[:24], start=20)])
    assert reply.prompt_logits is not None


def test_the_longest_unused_session_is_forgotten_first(model, segments):
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]], cache_bytes=1)
    one = segments(model("stacked"), [[0, 1, 2, 3]])[0]
    one.advance([Traversal("s", TEXT[:20])])
    segment.advance([Traversal(name, TEXT[:20]) for name in "abc"])
    assert segment.cached_bytes == one.cached_bytes  # only the newest is left
    assert list(segment._sessions._held) == ["c"]


@pytest.mark.parametrize("rows", [Draft(30, candidates=256), torch.zeros(256, 30, dtype=torch.uint8)])
def test_rows_that_need_more_memory_than_a_stage_gives_them_are_refused(model, segments, monkeypatch, rows):
    monkeypatch.setattr(segment_module, "LEAST_ROW_BUDGET_BYTES", 2**20)
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]], cache_bytes=1)
    few = Traversal("few", TEXT[:20], draft=Draft(5, candidates=4))
    many = Traversal("many", TEXT[:20], **({"draft": rows} if isinstance(rows, Draft) else {"tails": rows}))
    refused, reply = segment.advance([many, few])
    assert isinstance(refused, ConfigError)
    assert "ask for fewer candidates or bytes" in str(refused)
    assert_right(model("stacked"), reply)


def test_drafts_that_fit_only_one_after_the_other_give_the_same_as_together(model, segments, monkeypatch):
    asked = [Traversal(f"s{n}", TEXT[:20], draft=Draft(9, candidates=8, seed=n)) for n in range(4)]
    together = segments(model("stacked"), [[0, 1, 2, 3]])[0].advance(asked)
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]])
    monkeypatch.setattr(segment, "_row_budget_bytes", segment._row_bytes(asked[0]))
    apart = segment.advance(asked)
    assert [reply.tails.tolist() for reply in apart] == [reply.tails.tolist() for reply in together]


@pytest.mark.parametrize(
    "sizes, parts", [([], [[]]), ([1, 1, 1], [[0, 1], [2]]), ([9, 1, 1], [[0], [1, 2]]), ([0, 0, 0, 2], [[0, 1, 2, 3]])]
)
def test_a_batch_is_divided_into_parts_that_fit(sizes, parts):
    assert list(parts_within(2, sizes, [range(len(sizes))])) == parts


def test_forgetting_frees_the_cache(model, segments):
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]])
    segment.advance([Traversal("s", TEXT[:20])])
    assert segment.cached_bytes
    segment.forget("s")
    assert not segment.cached_bytes


def test_a_draft_is_a_function_of_seed_and_place(model, segments):
    """Drafted in two parts or in one, the bytes are the same; another seed gives others."""
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]])

    def drafted(text, length, seed, offset):
        return bytes(segment.advance([Traversal("s", text, draft=Draft(length, 1, seed, offset=offset))])[0].tails[0])

    whole = drafted(TEXT[:10], 8, 1, 10)
    begun = drafted(TEXT[:10], 3, 1, 10)
    assert whole == begun + drafted(TEXT[:10] + begun, 5, 1, 13)
    assert whole != drafted(TEXT[:10], 8, 2, 10)


def test_several_drafted_rows_carry_their_likelihoods(model, segments):
    """The first of many rows is the row that is drafted alone; the last block drafts, so it also says how likely."""
    (segment,) = segments(model("end_to_end"), [[0, 1, 2, 3]])
    settings = {"seed": 2, "temperature": 0.7, "top_p": 0.9}
    one, many = (
        segment.advance([Traversal("s", TEXT[:10], draft=Draft(5, candidates, **settings))])[0] for candidates in (1, 3)
    )
    logits = model("end_to_end").readings(torch.tensor([[*TEXT[:10], *one.tails[0].tolist()]]), "stack")[-1]
    alone = log_likelihood(logits[:, 9:-1], one.tails, 0.7, 0.9)
    assert one.draft_log_likelihood is None
    assert torch.equal(many.tails[:1], one.tails)
    torch.testing.assert_close(many.draft_log_likelihood[:1].double(), alone, atol=1e-3, rtol=0)


def drafted_tree(segment, rows=4, columns=6, seed=3):
    verify = Verify(1.0, 1.0, seed, 10)
    return segment.advance([Traversal("s", TEXT[:10], draft=Draft(columns, rows, seed, offset=10), verify=verify)])[0]


def path_of(t, row, column):
    """The tokens from the tree's root to a node."""
    path = [int(t.tails[row, column])]
    while column:
        row, column = int(t.parents[row, column]), column - 1
        path.insert(0, int(t.tails[row, column]))
    return path


def test_each_column_of_a_tree_has_different_beginnings(model, segments):
    first, _ = segments(model("stacked"), [[0, 1], [2, 3]])
    t = drafted_tree(first)
    for column in range(6):
        assert len({tuple(path_of(t, row, column)) for row in range(4)}) == 4


def test_every_token_of_a_tree_is_scored_behind_its_own_ancestors(model, segments, kind, monkeypatch):
    monkeypatch.setattr(segment_module, "verified", lambda t, _: t)
    whole, (first, last) = model(kind), segments(model(kind), [[0, 1], [2, 3]])
    t = last.advance([drafted_tree(first)])[0]
    for row, column in ((0, 5), (3, 5), (2, 2)):
        text = torch.tensor([[*TEXT[:10], *path_of(t, row, column)]])
        torch.testing.assert_close(t.tail_logits[row, column], whole.logits(text)[0, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_denoising_sweep_writes_the_model_s_bytes(model, segments, cut):
    forward = LocalForward(*segments(model("spans"), cut))
    reply = forward.run(Traversal("s", b"The", noise=Noise(16, seed=5)))
    assert reply.written == model("spans").sweep(b"The", 16, torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "traversal, complaint",
    [
        (Traversal("s", b""), "a prompt of 0 bytes"),
        (Traversal("s", TEXT + b"x"), "the model's context is 64: send 1 to 64 bytes in all"),
        (Traversal("s", TEXT[:60], tails=TAILS), "a prompt of 60 bytes and 7 bytes behind it"),
        (Traversal("s", TEXT[:60], draft=Draft(5)), "a prompt of 60 bytes and 5 bytes behind it"),
        (Traversal("s", TEXT[:5], read=6), "start = 0 and read = 6 do not fit a prompt of 5 bytes"),
        (Traversal("s", TEXT[:5], start=5), "start = 5 and read = 1 do not fit"),
        (Traversal("s", TEXT[:5], missing=(0, 1, 2, 3)), "missing names all 4 blocks: keep at least one"),
        (Traversal("s", TEXT[:5], noise=Noise(3, 0)), "not trained on spans"),
        (Traversal("s", TEXT[:5], tails=TAILS.float()), "send uint8"),
        (Traversal("s", TEXT[:5], draft=Draft(3, candidates=0)), "1 or more candidates"),
        (Traversal("s", TEXT[:5], draft=Draft(3), tails=TAILS), "no tails are given"),
        (Traversal("s", TEXT[:5], tails=TAILS, weigh=Weigh(1.0, 0, 0)), "ask for a draft of several"),
        (Traversal("s", TEXT[:5], draft=Draft(3), weigh=Weigh(1.0, 0, 0)), "ask for a draft of several"),
        (Traversal("s", TEXT[:5], piece=Piece("p", 0, 9)), "some columns of several drafted rows"),
        (Traversal("s", TEXT[:5], tails=TAILS[:1], piece=Piece("p", 0, 9)), "some columns of several drafted rows"),
        (Traversal("s", TEXT[:5], tails=TAILS, piece=Piece("p", 3, 9)), "some columns of several drafted rows"),
        (Traversal("s", TEXT[:5], tails=TAILS, piece=Piece("p", 0, 60)), "a prompt of 5 bytes and 60 bytes behind it"),
    ],
)
def test_what_makes_no_sense_is_refused_and_troubles_no_other(model, segments, traversal, complaint):
    (segment,) = segments(model("stacked"), [[0, 1, 2, 3]])
    refused, served = segment.advance([traversal, Traversal("other", TEXT[:5])])
    assert isinstance(refused, ConfigError)
    assert complaint in str(refused)
    assert_right(model("stacked"), served)


@pytest.mark.parametrize(
    "tails, piece",
    [
        (TAILS, Piece("p", 8, 20)),
        (TAILS, Piece("other", 7, 20)),
        (TAILS, Piece("p", 7, 30)),
        (TAILS[:2], Piece("p", 7, 20)),
    ],
)
def test_a_piece_that_does_not_follow_the_one_before_is_missing_something(model, segments, tails, piece):
    (segment,) = segments(model("spans"), [[0, 1, 2, 3]])
    segment.advance([Traversal("s", TEXT[:5], tails=TAILS, piece=Piece("p", 0, 20))])
    (missed,) = segment.advance([Traversal("s", TEXT[:5], tails=tails, piece=piece)])
    assert isinstance(missed, CacheMiss)
    (taken,) = segment.advance([Traversal("s", TEXT[:5], tails=TAILS, piece=Piece("p", 7, 20))])
    assert taken.tail_logits is not None


def test_states_of_other_shapes_are_refused(model, segments):
    first, rest = segments(model("stacked"), [[0, 1], [2, 3]])
    (handed,) = first.advance([Traversal("s", TEXT[:9])])
    (refused,) = rest.advance([handed.with_(prompt_state=handed.prompt_state[:, 1:])])
    assert "states have shapes [(1, 8, 32)], expected [(1, 9, 32)]" in str(refused)


@pytest.mark.parametrize("cut", [[[0, 1]], [[1, 2], [3]], [[2, 3], [0, 1]]])
def test_a_chain_with_a_gap_is_refused(model, segments, cut):
    with pytest.raises(ConfigError, match="give each block once and in order"):
        LocalForward(*segments(model("stacked"), cut))


def test_a_segment_needs_neighbours(model, segments):
    with pytest.raises(ConfigError, match=r"consecutive blocks of 0 to 3, got \[0, 2\]"):
        segments(model("stacked"), [[0, 2]])


@pytest.fixture
def directory(model, tmp_path):
    run = RunDirectory.create(tmp_path / "run", model("stacked").spec, "0" * 64)
    for index, block in enumerate(model("stacked").blocks):
        run.save_block(index, block.state_dict(), steps=1)
    return run


def test_a_segment_opens_its_own_blocks_only(model, directory):
    (file,) = directory.path.glob("block-3-*")
    file.unlink()
    segment = Segment.open(directory.path, [0, 1])
    assert segment.blocks == (0, 1)
    with pytest.raises(CheckpointError, match="block-3"):
        Segment.open(directory.path)
    with pytest.raises(ConfigError, match="there is no block 7"):
        Segment.open(directory.path, [7])


def test_the_version_names_the_blocks_and_their_weights(directory, model):
    before = Segment.open(directory.path, [0]).info.version
    assert Segment.open(directory.path, [2, 3]).info.version == before
    directory.save_combine("stack", (0, 0, 0, 1))
    assert Segment.open(directory.path, [0]).info.version != before


def test_a_forward_opened_from_a_directory_is_the_model(directory, model):
    forward = LocalForward.open(directory.path)
    assert [segment.blocks for segment in forward.segments] == [(0, 1), (2, 3)]
    assert_right(model("stacked", weighted=False), forward.run(Traversal("s", TEXT[:9])))
