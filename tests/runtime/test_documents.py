"""Documents in sequences: borders, padding, completion-only labels, the sandbox, and whole runs on conversations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.batch import IGNORE, as_batch, counted_tokens
from shardwright.runtime.chat import ChatTemplate, Document, read_conversations, tokenise_conversations
from shardwright.runtime.documents import rows_of_samples, rows_of_stream
from shardwright.runtime.losses import logits_of, summed_loss
from shardwright.runtime.reference import load_plain
from shardwright.schemas.errors import RecipeError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f g h"},
]


def document(*ids: int, counted: bool = True) -> Document:
    return Document(np.asarray(ids, dtype=np.int64), np.full(len(ids), counted))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    width=st.integers(2, 8),
    seed=st.integers(0, 50),
)
def test_a_stream_keeps_documents_apart(lengths: list[int], width: int, seed: int) -> None:
    """Against a plain walk over the tokens."""
    generator = np.random.default_rng(seed)
    documents = [document(*generator.integers(10, 99, size)) for size in lengths]
    rows = rows_of_stream(documents, width)
    flat = [(index, place, int(one.ids[place])) for index, one in enumerate(documents) for place in range(len(one.ids))]
    assert rows.shape == (len(flat) // width, 3, width)
    for row, (ids, labels, positions) in enumerate(rows):
        tokens = flat[row * width : (row + 1) * width]
        assert ids.tolist() == [token for _, _, token in tokens]
        for at, (index, _, _) in enumerate(tokens):
            follows = at + 1 < width and tokens[at + 1][0] == index
            assert labels[at] == (tokens[at + 1][2] if follows else IGNORE)
            first = next(place for place in range(width) if tokens[place][0] == index)
            assert positions[at] == at - first


def test_samples_stay_whole_and_padding_is_never_counted() -> None:
    documents = [document(1, 2, 3), document(4, 5), document(6, 7, 8, 9)]
    rows = rows_of_samples(documents, 6, pad=0, where="here", packing=True)
    assert rows[:, 0].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
    assert rows[:, 1].tolist() == [[2, 3, IGNORE, 5, IGNORE, IGNORE], [7, 8, 9, IGNORE, IGNORE, IGNORE]]
    assert rows[:, 2].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert len(rows_of_samples(documents, 6, pad=0, where="here", packing=False)) == 3
    assert counted_tokens(rows) == 6
    with pytest.raises(RecipeError, match=r"sample 3 has 4 tokens, a sequence holds 3") as caught:
        rows_of_samples(documents, 3, pad=0, where="here", packing=True)
    assert caught.value.code == "recipe/over-long-sample"


@pytest.fixture(scope="module")
def talking(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny checkpoint with a chat template, and conversations."""
    out = tmp_path_factory.mktemp("talking")
    shutil.copytree(tiny.checkpoint, out / "checkpoint")
    (out / "checkpoint/chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((out / "checkpoint/tokenizer_config.json").read_text())
    (out / "checkpoint/tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "|"}))
    for name, count in (("train.jsonl", 12), ("held_out.jsonl", 6)):
        talks = [
            [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "ok " * (n % 4 + 1)}]
            for n in range(count)
        ]
        (out / name).write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return type(tiny)(out / "checkpoint", out)


def test_only_answers_count(talking: Any) -> None:
    """The counted tokens, put together again, are the answers with their end marks."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(talking.checkpoint / "tokenizer.json"))
    (found,) = tokenise_conversations([(TALK, "here")], talking.checkpoint, tokenizer, True)
    text = "<user>a b|<assistant>c d|<user>e|<assistant>f g h|"
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert found.ids.tolist() == whole.ids
    kept = "".join(text[a:b] for (a, b), count in zip(whole.offsets, found.counted, strict=True) if count)
    assert kept == "c d|f g h|"
    (every,) = tokenise_conversations([(TALK, "here")], talking.checkpoint, tokenizer, False)
    assert bool(every.counted.all())
    with pytest.raises(RecipeError, match="no-completion"):
        tokenise_conversations([(TALK[:1], "here")], talking.checkpoint, tokenizer, True)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "bad-chat-template"),
        ("{{ messages.append(1) }}", "bad-chat-template"),
        ("{{ raise_exception('roles must alternate') }}", "bad-chat-template"),
        ("{% for %}", "bad-chat-template"),
        ("{{ messages | length }}{{ messages[-1]['content'] }}", "template-not-incremental"),
        (None, "no-chat-template"),
    ],
)
def test_templates_that_misbehave_are_refused(tmp_path: Path, template: str | None, code: str) -> None:
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RecipeError) as caught:
        ChatTemplate(tmp_path).spans(TALK, "here")
    assert caught.value.code == f"recipe/{code}"


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": []}', '{"messages": [{"role": "user"}]}', '{"text": "a"}'])
def test_records_that_are_no_conversation_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "data.jsonl").write_text(line + "\n")
    with pytest.raises(RecipeError, match="bad-record") as caught:
        read_conversations(tmp_path / "data.jsonl", "messages")
    assert "data.jsonl:1" in caught.value.where


def test_a_packed_row_equals_its_documents_alone(tiny: Any) -> None:
    """Logits and loss of two documents in one row are those of each in a batch of its own."""
    model, _ = load_plain(tiny.checkpoint, torch.float32, torch.device("cpu"))
    first, second = document(*range(10, 17)), document(*range(40, 45))
    rows = torch.from_numpy(rows_of_samples([first, second], 12, 0, "here", packing=True))
    batch = as_batch(rows)
    together = logits_of(model, batch.ids, batch.positions)[0]
    alone = [logits_of(model, torch.from_numpy(one.ids)[None])[0] for one in (first, second)]
    torch.testing.assert_close(together[:7], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[7:12], alone[1], rtol=1e-4, atol=1e-4)
    separate = sum(summed_loss(model, torch.from_numpy(one.ids)[None]) for one in (first, second))
    torch.testing.assert_close(summed_loss(model, rows), separate, rtol=1e-5, atol=1e-4)
    joined = logits_of(model, batch.ids)[0]
    assert float((joined[7:12].detach() - alone[1].detach()).abs().max()) > 1e-3


@pytest.mark.slow
def test_runs_on_conversations_equal_on_every_mesh(
    talking: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """Uneven counts of answer tokens in micro-batches: the loss is per counted token of the step."""
    recipe = {
        "data": {"format": "jsonl-messages"},
        "batch": {"sequence_tokens": 48},
        "schedule": {"steps": 2, "held_out_sequences": 2},
    }
    one = make_job(talking, strategy(), recipe=recipe)
    assert single_rank(one) == 0
    two = [make_job(talking, strategy(**axes), recipe=recipe) for axes in ({"shard": 2}, {"ep": 2})]
    run_many(2, two)
    for job in two:
        assert job.losses == pytest.approx(one.losses, abs=1e-5)
        assert [e.loss for e in job.record.evaluations] == pytest.approx(
            [e.loss for e in one.record.evaluations], abs=1e-5
        )
        check = next(check for check in job.record.checks if check.name == "documents-apart")
        assert check.passed
