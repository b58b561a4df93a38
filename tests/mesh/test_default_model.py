"""The default model as it is fetched: its numbers, its tokenizer's own ids, and its template."""

from pathlib import Path

import pytest

from services.models.ggml_types import GgmlType
from services.models.model_files import ModelFiles, open_model
from services.router.text.renderer import open_renderer
from services.router.text.tokens import Tokens, open_tokens
from tools.fetch import fetch

# The ids of the tokenizer that the model was trained with (each digit by itself, then GPT-2's words), by transformers.
KNOWN_IDS = [
    ("Hello, world!", [19556, 28, 905, 17]),
    ("  leading and   inner   spaces ", [216, 2899, 284, 256, 6210, 256, 5600, 216]),
    ("In 1984, 12345 people\n\n\tpaid €3.50",
     [788, 216, 33, 41, 40, 36, 28, 216, 33, 34, 35, 36, 37, 701, 1116, 197, 22606, 24927, 35, 30, 37, 32]),
    ("def f(x):\n    return x ** 2  # squared\n",
     [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 27402, 198]),
    ("한국어 문장입니다.",
     [33085, 246, 181, 130, 251, 183, 240, 129, 25947, 122, 133, 183, 248, 115, 183, 248, 223, 41259, 226, 41259,
      114, 30]),
    ("漢字とカナ", [177, 137, 112, 36518, 7365, 118, 10391, 121, 11100, 228]),
    ("😀👩\u200d👩\u200d👧",
     [10813, 242, 218, 10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]),
    ("naïve caf\u00e9\u0301", [3546, 46494, 37366, 151, 219]),
    ("I'll DON'T we've", [57, 3060, 422, 2154, 23, 68, 392, 3543]),
    ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ("\r\n\r\n \t", [18682, 216, 197]),
    ("³²½ Ⅻ ١٢٣", [39050, 19133, 16738, 216, 173, 223, 121, 216, 164, 111, 164, 112, 164, 113]),
    ("http://a.b/c?d=e&f=1", [5031, 1742, 81, 30, 82, 31, 83, 47, 84, 45, 85, 22, 86, 45, 33]),
]  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    return fetch()


@pytest.fixture(scope="module")
def model(path: Path) -> ModelFiles:
    return open_model(path)


@pytest.fixture(scope="module")
def tokens(model: ModelFiles) -> Tokens:
    return open_tokens(model)


def test_its_name_its_numbers_and_its_places(path: Path, model: ModelFiles) -> None:
    assert open_model("SmolLM2-135M-Instruct").paths == (path,)
    geometry = model.geometry
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads, geometry.head_dim) == (30, 9, 3, 64)
    assert (geometry.hidden_size, geometry.ffn_size, geometry.vocab_size) == (576, 1536, 49152)
    assert (geometry.max_context_tokens, geometry.rope_theta, geometry.tied_embeddings) == (8192, 100_000.0, True)
    assert model.tensors["output"] == model.tensors["token_embd"]
    assert model.tensors["token_embd"].ggml_type is GgmlType.Q8_0
    assert model.tensors["layers.29.ffn_down"].ggml_type is GgmlType.Q4_1


@pytest.mark.parametrize(("text", "ids"), KNOWN_IDS)
async def test_its_ids(tokens: Tokens, text: str, ids: list[int]) -> None:
    assert await tokens.encode(text, max_tokens=8192) == ids
    assert tokens.decode(tokens.encode_text(text), with_control=True) == text


def test_p4_8_its_ends(tokens: Tokens) -> None:
    assert {tokens.vocabulary.control_texts[index] for index in tokens.vocabulary.end_ids} == {
        "<|im_end|>",
        "<|endoftext|>",
    }


async def test_p4_9_its_chat(model: ModelFiles, tokens: Tokens) -> None:
    renderer = open_renderer(model, tokens.vocabulary)
    async with renderer.running():
        text = (await renderer.render([{"role": "user", "content": "Hi"}])).text
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = await tokens.encode(text, max_tokens=8192)
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-7:] == [26843, 2, 198, 1, 520, 9531, 198]
    assert [index for index in ids if index in tokens.vocabulary.control_texts] == [1, 2, 1, 2, 1]
