"""Data as unlucky or hostile users bring it: right values, or a refusal that names file and line."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from shardwright.checkpoints.config import read_config
from shardwright.runtime import chat, records, texts
from shardwright.runtime.batch import IGNORE
from shardwright.runtime.chat import ChatTemplate, read_conversations, tokenise_conversations
from shardwright.runtime.data import load_sequences
from shardwright.runtime.image_files import decoded
from shardwright.runtime.images import image_bytes
from shardwright.runtime.records import look, shared_records
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import BatchSpec, DataSpec, Recipe

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
STRIPS = TURN + "{% if add_generation_prompt %}<assistant>{% endif %}"
"""Takes white space off both ends of every message."""
TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}|"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def lines(path: Path, *found: bytes | dict[str, Any]) -> Path:
    path.write_bytes(b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in found))
    return path


def recipe(tokens: int = 48, **data: Any) -> Recipe:
    batch = BatchSpec(sequence_tokens=tokens, global_batch_sequences=2)
    return Recipe(data=DataSpec(train="t.jsonl", held_out="h.jsonl", **data), batch=batch)


@pytest.fixture
def talker(tiny: Any, tmp_path: Path) -> Any:
    """``talker(template)``: the tiny checkpoint with that chat template."""

    def build(template: str) -> Path:
        folder = tmp_path / "checkpoint"
        shutil.copytree(tiny.checkpoint, folder, dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return build


def say(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


# Files


def test_marks_line_ends_and_blank_lines_are_no_text(tiny: Any, tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines anywhere and no newline at the end: the same tokens as without."""
    config = read_config(tiny.checkpoint)
    plain = lines(tmp_path / "plain.jsonl", {"text": "one two"}, {"text": "three"})
    odd = lines(tmp_path / "odd.jsonl", b'\xef\xbb\xbf{"text": "one two"}\r\n\r\n   \n{"text": "three"}')
    found = [
        texts.tokenise(texts.read_texts(path, recipe().data), tiny.checkpoint, config, str(path))
        for path in (plain, odd)
    ]
    assert np.array_equal(*found)
    look(odd, recipe().data)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"text": "\xff"}\n', "no UTF-8"),
        (b"\xff\xfe{\x00\n", "no UTF-8"),
        (b'{"text": "\\ud800 alone"}\n', "surrogate"),
        (b'{"text": ' + b"1" * 5000 + b"}\n", "not JSON"),
        (b"[" * 200_000 + b"\n", "not JSON"),
        (b'{"text": "a"} {"text": "b"}\n', "not JSON"),
        (b'{"text": "a"}\r{"text": "b"}\r', "not JSON"),
        (b'{"text": null}\n', "NoneType"),
        (b'{"text": ["a"]}\n', "list"),
        (b"\x00\x00\n", "not JSON"),
        (b'{"text": "' + b"a" * 3000 + b'"}\n', "a line of more than"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, what: str) -> None:
    if b"aaa" in line:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 2000)
    path = lines(tmp_path / "t.jsonl", {"text": "fine"}, line)
    for read in (look, texts.read_texts):
        with pytest.raises(RecipeError, match=what) as caught:
            read(path, recipe().data)
        assert caught.value.code == "recipe/bad-record" and caught.value.where == f"{path}:2"
        assert caught.value.next_action


def test_a_file_in_one_line_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    """Two hundred megabytes without a newline, most of them a hole: an array of records, say."""
    path = tmp_path / "array.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'[{"text": "a"},')
        stream.truncate(200_000_000)
    with pytest.raises(RecipeError, match="a line of more than 64 MiB") as caught:
        look(path, recipe().data)
    assert caught.value.where == f"{path}:1"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_this_user_may_not_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"text": "a"})
    path.chmod(0)
    with pytest.raises(RecipeError, match="unreadable-data"):
        look(path, recipe().data)


def test_a_disk_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    path = lines(tmp_path / "t.jsonl", {"text": "a"})
    monkeypatch.setattr("builtins.open", broken)
    with pytest.raises(RecipeError, match=r"unreadable-data.*Input/output error"):
        look(path, recipe().data)


def test_texts_are_tokenised_some_at_a_time(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and the same, however many fit at once."""
    config = read_config(tiny.checkpoint)
    given = ["one two", "", "three" * 9, "4", "five"]
    whole = texts.tokenise(given, tiny.checkpoint, config, "here")
    for most in (1, 9, 20):
        monkeypatch.setattr(texts, "ENCODED_AT_ONCE", most)
        assert [one for some in texts._few_at_once(given) for one in some] == given
        assert all(sum(map(len, some)) <= most or len(some) == 1 for some in texts._few_at_once(given))
        assert np.array_equal(texts.tokenise(given, tiny.checkpoint, config, "here"), whole)


def test_held_out_records_that_are_trained_on_are_told(tmp_path: Path) -> None:
    train = lines(tmp_path / "t.jsonl", {"text": "a"}, {"text": "b"}, {"text": "b"}, {"text": "c"})
    held = lines(tmp_path / "h.jsonl", {"text": "x"}, {"text": "b"}, b'{"text": "c"}\r\n')
    (note,) = shared_records(train, held, recipe().data)
    assert "2 of 3 different held-out records" in note and f"{held}:2 = {train}:3" in note
    assert shared_records(train, lines(tmp_path / "o.jsonl", {"text": "new"}), recipe().data) == ()
    np.save(tmp_path / "p.npy", np.arange(9))
    assert shared_records(tmp_path / "p.npy", tmp_path / "p.npy", recipe(format="packed").data) == ()


# Conversations


def test_a_template_that_strips_counts_the_answers_as_they_stand(talker: Any, tmp_path: Path) -> None:
    """White space around messages is gone from the text; the counted tokens are the stripped answers and their ends."""
    folder = talker(STRIPS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    talk = say(("system", " s "), ("user", "\n q"), ("assistant", "  yes \n\n"), ("user", "u"), ("assistant", " no"))
    (found,) = tokenise_conversations([(talk["messages"], "here")], folder, tokenizer, True)
    text = "<system>s|<user>q|<assistant>yes|<user>u|<assistant>no|"
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert found.ids.tolist() == whole.ids
    counted = [text[a:b] for (a, b), here in zip(whole.offsets, found.counted, strict=True) if here]
    assert "".join(counted) == "yes|no|"


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (say(("system", "only a system prompt")), "no-completion"),
        (say(("user", "a question alone")), "no-completion"),
        (say(("user", "q"), ("assistant", "x" * 400)), "over-long-sample"),
        (say(("user", "q" * 400), ("assistant", "a")), "over-long-sample"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, "bad-record"),
        ({"messages": [{"role": "user", "content": None}]}, "bad-record"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "bad-record"),
        ({"messages": [{"role": "user", "content": {"nested": {"deep": "q"}}}]}, "bad-record"),
        ({"messages": [[{"role": "user", "content": "q"}]]}, "bad-record"),
        ({"messages": "q"}, "bad-record"),
        ({"messages": None}, "bad-record"),
    ],
)
def test_a_bad_conversation_is_named(talker: Any, tmp_path: Path, record: dict[str, Any], code: str) -> None:
    """Nothing is cut off: a sample that does not fit is refused, so no answer is lost in silence."""
    folder, fine = talker(STRIPS), say(("user", "q"), ("assistant", "a"))
    path = lines(tmp_path / "t.jsonl", fine, record)
    with pytest.raises(RecipeError) as caught:
        load_sequences(path, recipe(format="jsonl-messages"), folder, read_config(folder), tmp_path / "cache", 1)
    assert caught.value.code == f"recipe/{code}" and caught.value.where == f"{path}:2" and caught.value.next_action


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bergen"}}}
CALLING = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
]


def test_tool_calls_are_answers(talker: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", {"messages": CALLING})
    folder = talker(TOOLS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (found,) = tokenise_conversations(read_conversations(path, "messages"), folder, tokenizer, True)
    text = '<user>rain?|<assistant>weather({"city": "Bergen"})|<tool>yes|<assistant>It rains.|'
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert found.ids.tolist() == whole.ids
    counted = [text[a:b] for (a, b), here in zip(whole.offsets, found.counted, strict=True) if here]
    assert "".join(counted) == 'weather({"city": "Bergen"})|It rains.|'


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (STRIPS.replace(" | trim", ""), "call of 'weather' is not in its text"),
        (TOOLS.replace("m.content is not none", "true"), "it writes None"),
    ],
)
def test_a_template_that_loses_a_call_is_refused(talker: Any, template: str, what: str) -> None:
    folder = talker(template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(RecipeError, match=what) as caught:
        tokenise_conversations([(CALLING, "t.jsonl:7")], folder, tokenizer, True)
    assert caught.value.code == "recipe/template-without-tools" and caught.value.where == "t.jsonl:7"


def test_marks_of_answers_and_loop_controls_are_known(talker: Any) -> None:
    """What published templates use beside plain jinja; they see no clock, so a text is the same on every day."""
    template = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
        "{{ 'dated' if strftime_now is defined else '.' }}"
    )
    with ChatTemplate(talker(template)) as known:
        talk = say(("user", "a"), ("skip", "b"), ("user", "c"), ("user", "d"))["messages"]
        assert known.render(talk, "here") == "ac."


# Templates without end


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a power of variables": "{{ (messages | length + 8) ** ((messages | length + 8) ** (messages | length + 8)) }}",
    "while it is compiled": "{{ 9 ** (9 ** 9) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_ended_in_any_thread(talker: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In seconds, naming template and sample, and no process stays behind."""
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    folder, caught, made = talker(ENDLESS[name]), [], []
    start = chat.subprocess.Popen

    def kept(*args: Any, **options: Any) -> Any:
        made.append(start(*args, **options))
        return made[-1]

    monkeypatch.setattr(chat.subprocess, "Popen", kept)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def work() -> None:
        try:
            tokenise_conversations([(say(("user", "q"))["messages"], "t.jsonl:3")], folder, tokenizer, False)
        except RecipeError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    thread.join(120)
    assert not thread.is_alive() and time.monotonic() - began < 100
    (error,) = caught
    assert error.code == "recipe/chat-template-time" and error.where == str(folder / "chat_template.jinja")
    assert ("the template itself" if "compiled" in name else "t.jsonl:3") in str(error)
    assert [process.poll() is not None for process in made] == [True]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 99999999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ range(99999999) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
    ],
)
def test_a_template_that_wants_too_much_is_refused(talker: Any, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(chat, "RENDER_BYTES", 1 << 28)
    with pytest.raises(RecipeError) as caught:
        ChatTemplate(talker(template)).render(say(("user", "q"))["messages"], "t.jsonl:3")
    assert caught.value.code in ("recipe/bad-chat-template", "recipe/chat-template-time")
    assert caught.value.where.endswith("chat_template.jinja")


def test_a_renderer_ends_with_who_started_it(talker: Any) -> None:
    template = ChatTemplate(talker(STRIPS))
    process = template.process
    assert process.poll() is None
    del template
    assert process.poll() is not None
    with pytest.raises(RuntimeError), ChatTemplate(talker(STRIPS)) as other:
        process = other.process
        raise RuntimeError
    assert process.poll() is not None


# Images


def picture(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (6, 4), **options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new(mode, size, options.pop("color", 0)).save(stream, kind, **options)
    return stream.getvalue()


def test_pictures_of_other_colours_are_what_they_show() -> None:
    red = decoded(picture("CMYK", "JPEG", color=(0, 255, 255, 0), size=(16, 16)), "here").astype(int)
    assert red.shape == (16, 16, 3) and red[..., 0].min() > 240 and red[..., 1:].max() < 15
    grey = decoded(picture("L", color=77), "here")
    assert grey.shape == (4, 6, 3) and (grey == 77).all()
    bits = decoded(picture("1", color=1), "here")
    assert (bits == 255).all()


def test_a_picture_stands_as_the_camera_held_it() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:, 0] = 255
    made, stream = image.fromarray(pixels), io.BytesIO()
    exif = made.getexif()
    exif[0x0112] = 6
    made.save(stream, "PNG", exif=exif)
    found = decoded(stream.getvalue(), "here")
    assert found.shape == (6, 4, 3) and (found[0] == 255).all() and not found[1:].any()


def test_pictures_that_no_eight_bits_hold_or_that_move_are_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    frames = [image.new("RGB", (4, 4), color) for color in ("red", "green")]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    for data, what in (
        (stream.getvalue(), "2 frames"),
        (picture("I;16"), "mode I"),
        (picture("F", "TIFF"), "mode F"),
        (picture(size=(300, 300), kind="BMP")[:-20_000], "OSError"),
        (picture()[:30], "Error"),
        (b"", "Error"),
        (b"P6\n999999 999999\n255\n", "pixmap of 999999"),
    ):
        with pytest.raises(RecipeError, match=what) as caught:
            decoded(data, "t.jsonl:4")
        assert caught.value.code == "recipe/bad-image" and caught.value.where == "t.jsonl:4"


def test_a_huge_picture_is_refused_before_it_is_decoded() -> None:
    """A few bytes that say 60,000 × 60,000."""
    data = bytearray(picture())
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    with pytest.raises(RecipeError, match="bad-image"):
        decoded(bytes(data), "here")


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "a/../../secret", "link", "", ".", "nul\0byte", "x" * 5000, "missing.png"]
)
def test_files_beyond_the_data_are_out_of_reach(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(RecipeError) as caught:
        image_bytes({"path": path, "sha256": "0" * 64}, folder, "t.jsonl:2")
    assert caught.value.code == "recipe/bad-image" and caught.value.where == "t.jsonl:2"


@pytest.mark.parametrize("value", ["###", 7, None, "YQ", base64.b64encode(b"no picture").decode()])
def test_bytes_that_are_no_picture(value: Any) -> None:
    with pytest.raises(RecipeError, match="bad-image"):
        decoded(image_bytes({"base64": value}, Path(), "here"), "here")


def test_padding_of_samples_is_never_learned(talker: Any, tmp_path: Path) -> None:
    """Short samples alone in their rows: what stands behind them has no label."""
    folder = talker(STRIPS)
    path = lines(tmp_path / "t.jsonl", say(("user", "q"), ("assistant", "a")), say(("user", "r"), ("assistant", "b")))
    given = recipe(format="jsonl-messages", packing=False)
    rows = load_sequences(path, given, folder, read_config(folder), tmp_path / "cache", 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row, answer in zip(rows, ("a|", "b|"), strict=True):
        assert row[1][row[1] != IGNORE].tolist() == tokenizer.encode(answer, add_special_tokens=False).ids
