# SPDX-License-Identifier: Apache-2.0
"""Offline generation: outputs in order, mistakes in one line, and nothing left behind by a run that ends early."""

import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pagedweight_jax.errors import UserError
from pagedweight_jax.serving.interrupts import interrupts_held
from pagedweight_jax.serving.llm import LLM, encode
from pagedweight_jax.serving.request import SamplingParams

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background, which shells let ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def llm(flat, flat_engine, monkeypatch):
    """Not closed: its engine is everybody's."""
    monkeypatch.setattr("pagedweight_jax.serving.llm.Engine", lambda *args, **kwargs: flat_engine)
    return LLM(flat.checkpoint.path, flat_engine.config)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [(9,) * 60, (1, 2, 3), (7,)]
    lengths = (2, 30, 7)
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths])
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.token_ids) for o in outputs] == list(lengths)
    assert {o.finish_reason for o in outputs} == {"length"}
    assert {o.text for o in outputs} == {None}
    (alone,) = llm.generate(prompts[1:2], SamplingParams(max_tokens=30, ignore_eos=True))
    assert alone == outputs[1]
    assert llm.generate([], FOUR) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("Once upon a time", FOUR, "prompts must be a list, got one text of 16 characters"),
        ([(1, 2), ()], FOUR, "prompt 1: a prompt needs at least 1 token, got 0"),
        ([1, 2], FOUR, "prompt 0: a prompt must be a list of token ids ('int' object is not iterable)"),
        ([(1, 2), (3, 128)], FOUR, "prompt 1: prompt token 1 is 128, the vocabulary is 0..127"),
        ([(1, 2), (3,) * 93], FOUR, "prompt 1: a prompt of 93 tokens and 4 to generate make 97, max_model_len is 96"),
        ([(1, 2), "Once"], FOUR, "{path}: no tokenizer (none of tokenizer.json, vocab.json, tokenizer.model)"),
        ([(1, 2)], [FOUR, FOUR], "got 1 prompts and 2 sampling parameters"),
        ([(1, 2)], None, "params must be SamplingParams, or a list of them, got None"),
        ([(1, 2)], [None], "params must be SamplingParams, or a list of them, got [None]"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_request(llm, prompts, params, message):
    with pytest.raises(UserError) as error:
        llm.generate(prompts, params)
    assert str(error.value) == message.format(path=llm.path)
    assert not llm.engine.has_work


def test_a_prompt_of_bytes_that_are_no_text_is_refused():
    with pytest.raises(UserError, match=r"a prompt must be text: character 2 is '\\udcff'"):
        encode(None, "ab\udcff")


def test_a_text_is_encoded_whatever_the_length_of_its_tokenizer(llm, monkeypatch):
    class Empty:
        """No word of its own, so that it is false."""

        def __len__(self):
            return 0

        def encode(self, text):
            return [ord(character) for character in text]

        def decode(self, tokens):
            return f"{len(tokens)} tokens"

    monkeypatch.setattr("pagedweight_jax.serving.llm.load_tokenizer", lambda path: Empty())
    (output,) = llm.generate(["ab"], FOUR)
    assert (output.prompt_token_ids, output.text) == ((97, 98), "4 tokens")


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


@contextmanager
def disturbed(llm, monkeypatch, disturb):
    """``disturb`` in the middle of the third step: its decode call has run, and its state is not kept yet."""
    engine, calls = llm.engine, []
    decode = engine.programs.decode

    def third(*args):
        result = decode(*args)
        calls.append(None)
        if len(calls) == 3:
            disturb()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(engine, "programs", replace(engine.programs, decode=third))
        yield calls


MANY = ([(1, 2, 3)] * 9, SamplingParams(max_tokens=80, ignore_eos=True))


def test_ctrl_c_ends_a_run_between_two_steps_and_the_engine_serves_on(llm, monkeypatch):
    before = llm.generate([(1, 2, 3)], FOUR)
    with disturbed(llm, monkeypatch, ctrl_c) as calls, pytest.raises(KeyboardInterrupt):
        llm.generate(*MANY)
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_work
    assert llm.generate([(1, 2, 3)], FOUR) == before
    llm.engine.check_invariants()


def break_down():
    raise RuntimeError("the step broke down")


def two_ctrl_c():
    ctrl_c()
    ctrl_c()


@pytest.mark.parametrize(("disturb", "error"), [(two_ctrl_c, KeyboardInterrupt), (break_down, RuntimeError)])
def test_what_cuts_a_step_short_is_what_the_caller_hears_of(flat, flat_engine, monkeypatch, disturb, error):
    with LLM(flat.checkpoint.path, flat_engine.config) as llm:  # its own engine: this one is lost
        with disturbed(llm, monkeypatch, disturb) as calls, pytest.raises(error):
            llm.generate(*MANY)
        assert len(calls) == 3
        assert llm.engine.state.arena_AW.is_deleted()
        assert not llm.engine.has_work
        assert llm.engine.blocks.used_blocks == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait():
    ended = []

    def step_without_end():
        with interrupts_held():
            for _ in range(2):
                ctrl_c()
                ended.append(False)

    with pytest.raises(KeyboardInterrupt):
        step_without_end()
    assert ended == [False]


def test_ctrl_c_is_not_lost_at_the_end_and_other_handlers_stay():
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        ctrl_c()
    seen, before = [], signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    try:
        with interrupts_held() as let_through:
            ctrl_c()
            assert not seen
            let_through()
            let_through()
            assert seen == ["theirs"]
            ctrl_c()
            ctrl_c()
            assert seen == ["theirs"] * 2
            let_through()
            let_through()
        assert seen == ["theirs"] * 3
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_not_lost_behind_an_error():
    def fails():
        with interrupts_held():
            ctrl_c()
            raise UserError("a prompt that cannot be served")

    with pytest.raises(KeyboardInterrupt) as interrupt:
        fails()
    assert isinstance(interrupt.value.__context__, UserError)


def test_another_thread_may_generate(llm):
    outputs = []
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate([(1, 2, 3)], FOUR)))
    thread.start()
    thread.join()
    assert outputs == llm.generate([(1, 2, 3)], FOUR)


def test_an_interrupt_leaves_no_request(llm):
    def interrupt(llm):
        if len(llm.engine.events) == first + 3:
            raise KeyboardInterrupt

    first = len(llm.engine.events)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([(1, 2, 3)] * 9, SamplingParams(max_tokens=80, ignore_eos=True), on_step=interrupt)
    assert not llm.engine.has_work
    llm.engine.check_invariants()
    assert llm.engine.blocks.used_blocks == 0
