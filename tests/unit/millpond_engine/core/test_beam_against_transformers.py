"""ENG-042: beam search in the core against `generate` of transformers, on a model that is a table of logits."""

from __future__ import annotations

import random

import pytest
import torch
from tests.unit.millpond_engine.core.harness import Loop, TokenRunner, make_request
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from millpond_engine.records.capacity import Capacity
from millpond_engine.records.request import BeamParams
from millpond_engine.records.settings import SchedulerSettings

SIZE = 23
END = 5
PAD = 22


class TableConfig(PretrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits depend on the last two tokens only."""

    config_class = TableConfig

    def __init__(self, config: TableConfig, table: torch.Tensor) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids, **rest):
        del rest
        before = torch.roll(input_ids, 1, dims=1)
        return CausalLMOutput(logits=self.table[before, input_ids])

    def prepare_inputs_for_generation(self, input_ids, **rest):
        del rest
        return {"input_ids": input_ids}

    @property
    def device(self):
        return torch.device("cpu")


def make_table(seed: int, end_bias: float) -> torch.Tensor:
    rng = random.Random(seed)
    table = torch.tensor([[[rng.gauss(0, 2) for _ in range(SIZE)] for _ in range(SIZE)] for _ in range(SIZE)])
    table[:, :, END] += end_bias
    return table


@pytest.mark.parametrize("penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("end_bias", [-1.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_eng_042_texts_and_scores_equal_generate(seed, end_bias, penalty):
    width, max_tokens = 4, 14
    table = make_table(seed, end_bias)
    logprobs = torch.log_softmax(table, dim=-1)

    def branch(tokens, number):
        top = torch.topk(logprobs[tokens[-2], tokens[-1]], number)
        return tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    prompt = [1, 2, 3, 4, seed]
    model = TableModel(TableConfig(vocab_size=SIZE, is_encoder_decoder=False), table).eval()
    expected = model.generate(
        torch.tensor([prompt]),
        generation_config=GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=penalty,
            eos_token_id=END,
            pad_token_id=PAD,
            bos_token_id=1,
            do_sample=False,
            use_cache=False,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    capacity = Capacity(num_blocks=80, block_tokens=4, max_model_tokens=64, eos_token_ids=(END,))
    loop = Loop(SchedulerSettings(policy="Fifo"), capacity, runner=TokenRunner(capacity, branch=branch))
    loop.add(make_request("r", prompt, max_tokens, n=width, beam=BeamParams(width, penalty)))
    loop.run()
    for index in range(width):
        outcome = loop.outcomes["r", index]
        tokens = outcome.tokens + ([END] if outcome.stop_token is not None else [])
        text = expected.sequences[index][len(prompt) :].tolist()
        assert text[: len(tokens)] == tokens
        assert set(text[len(tokens) :]) <= {PAD}, "transformers pads behind the end"
        assert outcome.score == pytest.approx(float(expected.sequences_scores[index]), abs=1e-5)
