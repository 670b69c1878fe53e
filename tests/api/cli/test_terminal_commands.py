"""`run generate`, `run chat`, `run bench` and `run plan` in this process.

Most tests of the first three start a real engine. `run plan` starts none.
"""

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import ostinato
from ostinato.api.cli.chat_command import Conversation
from ostinato.api.cli.terminal import show_phases, write_stream
from ostinato.benchmarks.report.record import read_records
from ostinato.commands import run
from ostinato.runtime.errors import EngineError
from ostinato.runtime.host_resources import available_cores
from ostinato.runtime.types.outputs import RequestOutput
from tests.runtime.tiny import MODEL

DEMO = Path(ostinato.__file__).parents[1] / "models" / "demo"
# An eager engine with the reference kernel starts fastest, and these tests check only the commands.
FAST = ["graphs.mode=eager", "graphs.attention=reference", "graphs.pack_weights=false"]
TINY = [
    "model=llama-45m",
    "model.config={vocab_size: 3072, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 256}",
    "scheduler.max_num_batched_tokens=128",
]


def test_generate_streams_the_continuation(capsys: pytest.CaptureFixture[str]):
    words = ["generate", "Hello", "generate.chat=true", "generate.temperature=0"]
    assert run([*words, *FAST]) == 0
    first = capsys.readouterr().out
    assert run([*words, "generate.stop=[the]", *FAST]) == 0
    stopped = capsys.readouterr().out
    assert len(first.strip()) > 5
    assert stopped.rstrip("\n") == first.rstrip("\n").partition("the")[0]


def test_generate_reads_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert run(["generate", "-", "generate.max_tokens=3", *TINY, *FAST]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_generate_is_repeatable_with_a_seed(capsys: pytest.CaptureFixture[str]):
    words = ["generate", "Hello", "generate.max_tokens=12", "generate.temperature=1", *TINY, *FAST]
    texts = []
    for seed in (1, 1, 2):
        assert run([*words, f"generate.seed={seed}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_generate_refuses_an_empty_prompt(capsys: pytest.CaptureFixture[str]):
    assert run(["generate", ""]) == 2
    assert capsys.readouterr().err.startswith("run: the prompt is empty")


def test_generate_beyond_the_context_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert run(["generate", "Hello", "generate.max_tokens=1000", *TINY, *FAST]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("run: max_tokens=1000 and the prompt's length, ")
    assert "256 tokens; set max_tokens to at most " in line


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["no config.json and no GGUF file in"]),
        (
            {"config.json": {"architectures": ["FooForCausalLM"], "model_type": "foo"}},
            ["'FooForCausalLM' is not supported", "has no model_type='foo'"],
        ),
    ],
)
def test_a_model_that_can_not_be_opened_is_one_line(
    files: dict[str, object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert run(["generate", "Hello", f"model.path={tmp_path}", *FAST]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run: ")
    assert [word for word in words if word not in line] == []


def test_the_running_phases_of_a_start_are_shown():
    shown: list[str] = []
    report = show_phases(shown.append)
    for event in (("kernels", None), ("compile", None), ("compile", 0.6), ("kernels", 36.2)):
        report(*event)
    assert shown == ["kernels", "kernels, compile", "kernels", "kernels is done"]


def test_chat_through_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    lines = "Hello\n\n/nonsense\n/reset\nHello\n/system Be kind.\n/exit\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "chat.temperature=0", *FAST]) == 0
    text = capsys.readouterr().out
    answer = text.splitlines()[0]
    assert len(answer) > 5
    assert text.count(answer) == 2  # the history was cleared, so the answers are equal
    assert "there is no command /nonsense" in text
    assert "(the conversation is forgotten)" in text
    assert text.endswith("(system message: Be kind.)\n")


def test_a_question_too_long_for_the_context_can_be_taken_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = "Hello\n" + "very " * 400 + "long\nHello\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(["chat", "chat.max_tokens=4", *TINY, *FAST]) == 0
    text = capsys.readouterr().out
    assert text.count("/reset forgets the conversation") == 1


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_model_that_cannot_chat_ends_the_conversation_at_its_first_question(
    system: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)  # a tokenizer without a chat template
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nHello?\n"))
    words = [f"model.tokenizer={tmp_path}", f"chat.system='{system}'", *TINY, *FAST]
    assert run(["chat", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    line = printed.err.splitlines()[-1]
    assert line.startswith("run: this model has no chat template, so it cannot chat")


def test_a_conversation_keeps_its_system_message_first():
    conversation = Conversation("Be brief.")
    conversation.ask("Hi")
    conversation.answer("Hello.")
    conversation.ask("Bye")
    conversation.take_back()
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
    ]
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_the_first_interrupt_stops_between_two_steps(capsys: pytest.CaptureFixture[str]):
    ended: list[str] = []

    def outputs() -> Iterator[RequestOutput]:
        try:
            for delta in ("one ", "two ", "three "):
                if delta == "two ":
                    os.kill(os.getpid(), signal.SIGINT)  # like a signal during a step
                yield RequestOutput(request_id="r", index=0, text_delta=delta, new_token_ids=[1])
        finally:
            ended.append("aborted")

    before = signal.getsignal(signal.SIGINT)
    assert write_stream(outputs()) == ("one two ", True)
    assert ended == ["aborted"]
    assert capsys.readouterr().out == "one two "
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_in_mid_stream_is_raised():
    output = RequestOutput(request_id="r", index=0, text_delta="", new_token_ids=[], error="lost")
    with pytest.raises(EngineError, match="lost"):
        write_stream(iter([output]))


def test_plan_is_a_table_of_80_columns(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", *TINY, "plan.free_gib=2"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "architecture  LlamaForCausalLM" in text
    assert "- budget: 0.9 of 2.00 GiB of free memory" in text


def test_plan_as_json_counts_every_weight(capsys: pytest.CaptureFixture[str]):
    words = ["plan", *TINY, "plan.json=true", "plan.free_gib=2", "graphs.compress_weights=false"]
    assert run(words) == 0
    ledger = json.loads(capsys.readouterr().out)
    # Embedding and head, two layers of attention, MLP and two norms, and the last norm; bfloat16.
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32
    weights = (2 * 3072 * 32 + 2 * layer + 32) * 2
    rotary = ledger["weights_bytes"] - weights
    assert 0 <= rotary <= 2 * 256 * 8 * 4  # cosines and sines, in either layout
    assert ledger["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2
    assert ledger["max_model_len"] == 256
    assert ledger["num_blocks"] == 64 * 16 + 1
    assert ledger["free_bytes"] == 2 << 30


def test_plan_of_a_model_with_windows(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "model=gemma3-1b", "plan.free_gib=16", "model.max_model_len=8192"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "- KV groups: 4 layers keep all tokens (blocks of 96), 22 layers keep 512" in text
    assert run([*words, "plan.json=true"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["kv_bytes_per_token"] == 26 * 2 * 256 * 2
    full, windowed = ledger["groups"]
    assert (full["window"], full["units"], windowed) == (
        0,
        6,
        {"window": 512, "units": 1, "pieces": 6},
    )
    # 86 blocks of 96 tokens for 8,192 tokens, and 34 of 16 for 512 in sight
    assert ledger["kv_bytes_per_sequence"] == (86 + 34) * ledger["bytes_per_block"]
    assert ledger["num_tokens"] == int(ledger["num_full_sequences"] * 8192)


def test_plan_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]):
    words = ["plan", *TINY, "device.name=cuda", "plan.free_gib=80", "plan.json=true"]
    assert run(words) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["device"] == "cuda with 80 GiB free"
    assert ledger["graph_bytes"] > 0
    assert ledger["kv_bytes"] > 70 << 30


def test_plan_counts_a_cache_of_eight_bits(capsys: pytest.CaptureFixture[str]):
    words = ["plan", *TINY, "plan.free_gib=2", "plan.json=true", "cache.dtype=fp8_e4m3"]
    assert run(words) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["cache_dtype"] == "float8_e4m3fn"
    assert ledger["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 1


def test_plan_shows_what_each_tier_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = tmp_path / "a long name of a directory" / "for copies of the blocks of the KV cache"
    words = ["plan", *TINY, "plan.free_gib=2", f"cache.disk_dir={directory}", "cache.disk_gib=1"]
    assert run([*words, "device.name=cpu"]) == 0
    num_blocks = (1 << 30) // 4096  # a block has 2,048 bytes, and takes a page on disk
    lines = capsys.readouterr().out.splitlines()
    assert (
        f"disk tier     {num_blocks:,} blocks, {16 * num_blocks:,} tokens, in {directory}" in lines
    )
    assert any(line.split()[:3] == ["tier", "buffers", "0.063"] for line in lines)
    assert not directory.exists()
    assert run([*words, "device.name=cuda", "cache.host_gib=0.5", "plan.json=true"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert ledger["tiers"] == {
        "host": {"num_blocks": num_blocks, "num_tokens": 16 * num_blocks},
        "disk": {
            "num_blocks": num_blocks,
            "num_tokens": 16 * num_blocks,
            "directory": str(directory),
        },
    }
    assert ledger["tier_bytes"] == 2 * 2048


def test_plan_without_a_tier(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", *TINY, "plan.free_gib=2"]) == 0
    assert "tier" not in capsys.readouterr().out
    assert run(["plan", *TINY, "plan.free_gib=2", "plan.json=true"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert (ledger["tiers"], ledger["tier_bytes"]) == ({}, 0)


def test_plan_of_several_engines_is_that_of_one(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", *TINY, "plan.free_gib=2", "parallel.data=2"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "replicas      2, each with 1.000 GiB; the table shows one" in text
    assert "- budget: 0.9 of 1.00 GiB of free memory" in text
    assert run(["plan", *TINY, "device.memory_gib=1", "plan.json=true", "parallel.data=2"]) == 0
    assert json.loads(capsys.readouterr().out)["free_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["graphs.experts=flashinfer"],
            "graphs.experts=flashinfer needs a mixture of experts, which LlamaForCausalLM is not; "
            "leave it at auto",
        ),
        (
            ["graphs.experts=flashinfer", "device.name=cuda"],
            "graphs.experts=flashinfer needs a mixture of experts, which LlamaForCausalLM is not; "
            "leave it at auto",
        ),
        (
            ["graphs.attention=triton", "device.name=cpu"],
            "graphs.attention=triton cannot serve this model: triton: needs a CUDA device, but the "
            "model is on cpu",
        ),
        (
            ["runtime.determinism=bitwise", "graphs.attention=reference", "device.name=cpu"],
            "runtime.determinism=bitwise, but the bits of an answer would depend on its batch: "
            "attention runs on reference; set graphs.attention=cpu; or leave runtime.determinism at "
            "auto",
        ),
        (
            ["runtime.determinism=bitwise", "device.name=cuda"],
            "runtime.determinism=bitwise, but the bits of an answer would depend on its batch: "
            "kernels on cuda choose their order of sums by the batch; set device.name=cpu; or "
            "leave runtime.determinism at auto",
        ),
        (
            ["graphs.attention=cpu", "device.name=cuda"],
            "graphs.attention=cpu cannot serve this model: cpu: it runs on the CPU, not on cuda",
        ),
        (
            ["graphs.attention=reference", "graphs.mode=captured", "device.name=cuda"],
            "graphs.attention=reference reads lengths on the host, so its steps cannot be "
            "captured; set graphs.mode=compiled",
        ),
    ],
)
def test_plan_refuses_what_the_start_would_refuse(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
):
    assert run(["plan", *TINY, "plan.free_gib=2", *words]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"run: {message}\n"
    assert captured.out == ""


def test_plan_of_experts_for_a_gpu_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The machine of the command need not have FlashInfer or a GPU."""
    words = ["graphs.experts=flashinfer", "device.name=cuda", "plan.free_gib=8"]
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "dtype": "bfloat16",
    }
    model = {**MODEL, **experts, "architectures": ["Qwen3MoeForCausalLM"]}
    for size, status in ((32, 0), (36, 1)):
        fields = {**model, "model_type": "qwen3_moe", "moe_intermediate_size": size}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert run(["plan", f"model.path={tmp_path}", *words]) == status
    assert "the intermediate size on this rank is 36" in capsys.readouterr().err


def test_plan_checks_the_experts_of_every_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rank 0 is the last stage. Here only the first stage has experts."""
    words = ["graphs.experts=flashinfer", "device.name=cuda", "plan.free_gib=8"]
    fields = {
        **MODEL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 36,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert run(["plan", f"model.path={tmp_path}", "parallel.pipeline=2", *words]) == 1
    assert "the intermediate size on this rank is 36" in capsys.readouterr().err


def test_plan_that_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert run(["plan", *TINY, "plan.free_gib=0.001"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("run: not enough memory: ")
    assert captured.err.count("\n") == 1


def test_bench_writes_a_table_and_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    work = tmp_path / "work.json"
    requests = [{"prompt": [5, 6, 7], "max_tokens": 4}, {"prompt": [8] * 40, "max_tokens": 9}]
    work.write_text(json.dumps(requests))
    record_file = tmp_path / "new" / "record.json"
    words = ["workload=tokens", f"workload.path={work}", f"bench.output={record_file}"]
    assert run(["bench", *words, "bench.repeats=2", *TINY, *FAST]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.rstrip().splitlines()[:-2])) <= 100
    assert str(record_file) in table
    [record] = read_records(record_file)  # the record fits the schema
    [point] = record.points
    metrics = point.metrics
    assert len(metrics["output_throughput"].runs) == 2
    rate, seconds = metrics["output_throughput"].runs[0], metrics["duration"].runs[0]
    assert rate * seconds == pytest.approx(13)
    assert metrics["cached_prompt_tokens"].runs == (0, 0)
    assert all(0 <= share <= 1 for share in metrics["host_gap"].runs)
    assert all(rate > 0 for rate in metrics["read_bandwidth"].runs)
    assert all(share > 0 for share in metrics["roofline_share"].runs)
    steps = point.details["steps"]
    assert sum(steps["prompt_tokens"]) == 43
    assert sum(steps["decode_tokens"]) == 13 - 2  # the prompts' last steps give a token each
    assert record.notes == []
    conditions = record.conditions
    assert conditions["peak_rss_mib"] > 50
    assert conditions["config"]["model"]["config"]["hidden_size"] == 32
    assert conditions["threads"] == available_cores()
    assert {"python", "torch", "ostinato"} <= conditions["versions"].keys()


def test_bench_leaves_out_what_the_context_can_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record_file = tmp_path / "record.json"
    words = [f"bench.output={record_file}", "bench.repeats=1", "bench.warmup=0"]
    assert run(["bench", *words, "bench.parts=[single,ttft]", *TINY, *FAST]) == 0
    [record] = read_records(record_file)
    assert [point.label for point in record.points] == ["single"]
    assert record.notes == [
        "single: ids modulo the vocabulary of 3072",
        "ttft left out: 513 tokens, the context holds 256",
    ]
    assert record.points[0].metrics["decode_rate"].value > 0
    assert "ttft left out" in capsys.readouterr().out


def test_bench_refuses_ids_outside_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    work = tmp_path / "work.json"
    work.write_text('[{"prompt": [3072], "max_tokens": 1}]')
    assert run(["bench", "workload=tokens", f"workload.path={work}", *TINY, *FAST]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("run: workload.path: list has token id 3072, but the vocabulary of ")
