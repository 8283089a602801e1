"""The templates for models that come without one."""

import pytest

from libcolibri.builtin_templates import SOURCES, builtin_template

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2+2?"},
]
EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] 2+2? [/INST]",
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST] Hello</s>[INST] 2+2? [/INST]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
    "gemma4": "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
    "<|turn>user\n2+2?<turn|>\n<|turn>model\n",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n",
    "granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Hello<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>2+2?<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "deepseek": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Hello<｜end▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜>",
    "tulu": "<s><|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\nHello</s>\n<|user|>\n2+2?\n<|assistant|>\n",
}


class Vocabulary:
    def __init__(self, *tokens):
        self._tokens = tokens

    def token_id(self, token):
        return self._tokens.index(token) if token in self._tokens else None


MARKER = {"chatml": "<|im_start|>", "llama3": "<|start_header_id|>", "gemma": "<start_of_turn>", "gemma4": "<|turn>",
          "granite": "<|start_of_role|>", "deepseek": "<｜User｜>"}  # fmt: skip
FAMILY = {"llama2": "llama", "mistral": "mixtral", "phi3": "phi3", "tulu": "olmoe"}


@pytest.mark.parametrize("name", SOURCES)
def test_conversations(name):
    vocabulary = Vocabulary(*(marker for marker in [MARKER.get(name)] if marker))
    template = builtin_template(FAMILY.get(name, "unheard_of"), vocabulary, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.builtin == name
    assert template.render(TALK) == EXPECTED[name]


def test_an_unknown_format_is_not_guessed():
    assert builtin_template("unheard_of", Vocabulary("<s>"), {}) is None


def test_markers_say_more_than_the_family():
    assert builtin_template("llama", Vocabulary("<|im_start|>"), {}).builtin == "chatml"
