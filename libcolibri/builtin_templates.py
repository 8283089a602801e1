"""Chat templates for models that come without one.

In: the model's family and vocabulary. Out: the template of the format its turn markers belong to, or that its family was tuned with.
"""

from collections.abc import Mapping
from typing import Any

from .chat_template import ChatTemplate

_NO_SYSTEM = "{% if m.role == 'system' %}{{ raise_exception('system messages are not part of this format') }}{% endif %}"
_OPEN = "{% if add_generation_prompt %}"
SOURCES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + _OPEN + "<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        + _OPEN + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "llama2": (
        "{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' ~ m.content ~ '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ ns.system ~ m.content | trim }} [/INST]{% set ns.system = '' %}"
        "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}" + _NO_SYSTEM + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}" + _NO_SYSTEM + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + _OPEN + "<start_of_turn>model\n{% endif %}"
    ),
    "gemma4": (
        "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<turn|>\n{% endfor %}" + _OPEN + "<|turn>model\n{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + _OPEN + "<|assistant|>\n{% endif %}"
    ),
    "granite": (
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
        + _OPEN + "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        + _OPEN + "<｜Assistant｜>{% endif %}"
    ),
    "tulu": (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
        + _OPEN + "<|assistant|>\n{% endif %}"
    ),
}  # fmt: skip
_MARKERS = {  # a token that only this format has -> the format
    "<|im_start|>": "chatml",
    "<|start_header_id|>": "llama3",
    "<start_of_turn>": "gemma",
    "<|turn>": "gemma4",
    "<|start_of_role|>": "granite",
    "<｜User｜>": "deepseek",
    "[INST]": "mistral",
}
_FAMILIES = {  # families whose vocabularies hold no markers of their format
    "llama": "llama2",
    "mistral": "mistral",
    "mixtral": "mistral",
    "phi3": "phi3",
    "phimoe": "phi3",
    "olmoe": "tulu",
    "olmo2": "tulu",
}


def builtin_template(family: str, tokenizer: Any, entry: Mapping[str, Any]) -> ChatTemplate | None:
    """The template for a model without one, None when neither its vocabulary nor its family tells the format.

    entry: the manifest's "tokenizer", with bos_token and eos_token
    """
    name = next((name for marker, name in _MARKERS.items() if tokenizer.token_id(marker) is not None), None) or _FAMILIES.get(family)
    return (
        None
        if name is None
        else ChatTemplate(SOURCES[name], bos_token=entry.get("bos_token"), eos_token=entry.get("eos_token"), builtin=name)
    )
