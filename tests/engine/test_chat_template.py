"""Chat templates render as `transformers` renders them, and a hostile one is stopped."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import pytest

from engine.errors import SourceError
from engine.sources.base import TokenizerSpec
from engine.text.chat_template import ChatError, ChatTemplate
from tests.engine.models import TEMPLATE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>&'\"ü\n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "1 + 1?"},
]
TOOLS = [{"type": "function", "function": {"name": "ädd", "parameters": {"type": "object", "b": [1, 2.5, None]}}}]

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if loop.index0 % 2 == 0 and message.role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TOOL_USE = """{% if tools %}
# Tools
{% for tool in tools %}
    {{ tool | tojson }}
    {{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% set ns = namespace(last=-1, found=false) %}
{% for message in messages[::-1] %}
    {% if message.role == 'user' and not ns.found %}
        {% set ns.last = messages|length - 1 - loop.index0 %}
        {% set ns.found = true %}
    {% endif %}
{% endfor %}
{% for message in messages %}
    {% if loop.index0 > 2 %}{% continue %}{% endif %}
    {% if loop.index0 == ns.last %}*{% endif %}
    {{ message.role ~ ':' ~ message.content.split('\\n')[0].strip() }}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% macro wrap(text) %}<{{ text }}>{% endmacro %}
{{ wrap(enable_thinking | default('unset')) }}{{ eos_token }}{{ pad_token is defined }}
{%- generation %}inside{% endgeneration %}
"""
DATED = (
    "{{ strftime_now('%Y') }} {{ 'x' * 3 }} {{ '%03d' % 7 }} {{ [1,2]|join('-') }} "
    "{{ 'ab'.replace('a','c').center(8) }} {{ '{:>5}'.format(1) }} {{ dict(a=1) }} {{ 2 ** 10 }}"
)
TEMPLATES = {"chatml": TEMPLATE, "llama3": LLAMA3, "tool-use": TOOL_USE, "functions": DATED}


def spec(template: str | None) -> TokenizerSpec:
    return TokenizerSpec("{}", template, "<s>", "</s>", {"unk_token": "<unk>"})


def transformers_render(template: str, **values: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    render: Any = render_jinja_template
    rendered, _ = render([values.pop("messages")], chat_template=template, **special, **values)
    return str(rendered[0])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_it_renders_as_transformers_does(name: str, prompt: bool, tools: Any) -> None:
    template = TEMPLATES[name]
    ours = ChatTemplate(spec(template)).render(CHAT, add_generation_prompt=prompt, tools=tools)
    assert ours == transformers_render(template, messages=CHAT, add_generation_prompt=prompt, tools=tools)


def test_switches_of_the_template_reach_it() -> None:
    ours = ChatTemplate(spec(TOOL_USE)).render(CHAT, variables={"enable_thinking": False})
    assert "<False>" in ours


def test_without_a_template_it_is_a_plain_transcript() -> None:
    template = ChatTemplate(spec(None))
    assert template.is_default
    assert template.render([{"role": "user", "content": "Hi"}]) == "User: Hi\n\nAssistant:"


def test_a_refusal_carries_the_templates_words() -> None:
    with pytest.raises(ChatError, match="roles must alternate"):
        ChatTemplate(spec(LLAMA3)).render([{"role": "assistant", "content": "me first"}])


def test_a_message_without_content_is_the_callers_fault() -> None:
    with pytest.raises(ChatError, match="check the messages"):
        ChatTemplate(spec(TOOL_USE)).render([{"role": "user"}])


NESTED = "".join(f"{{% for x{depth} in [1] %}}" for depth in range(30)) + "{% endfor %}" * 30  # Python allows 20


@pytest.mark.parametrize("template", ["{% for x in %}", "{{ unclosed", "{% nonsense %}", NESTED])
def test_a_damaged_template_is_a_source_error(template: str) -> None:
    with pytest.raises(SourceError, match="chat template is damaged"):
        ChatTemplate(spec(template))


HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000 * 10 }}",
    "{{ 1000000000 * [1] }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'x'.center(1000000000) }}",
    "{{ 'x' | center(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{x:{y}}'.format_map({'x': 1, 'y': 1000000000}) }}",
    "{{ [1] | batch(1000000000, 'x') | list }}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(9) %}{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ range(1000000000) | list }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__class__=1) }}",
    "{{ raise_exception.__globals__.items() }}",
    "{{ {} | tojson(indent=1000000000) }}",
    "{{ [1, 2] | tojson(separators=('x' * 10000000, ':')) }}",
    "{{ ('\\n' * 1000000) | indent(90000) }}",
    "{{ ('\\t' * 1000000).expandtabs(90000) }}",
    "{{ ('x' * 1000000).translate({120: 'x' * 1000000}) }}",
    "{{ ('x' * 1000000).encode().replace('x'.encode(), ('x' * 1000000).encode()) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "{{ ('%99999d' * 10000) % ((1,) * 10000) }}",
    "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "{{ ([['x' * 1000] * 1000] * 1000) | join(',') }}",
    "{{ ','.join(['x' * 1000000] * 100000) }}",
    "{{ lipsum(n=90000, max=90000) }}",
    "{{ raise_exception([['x' * 10000] * 10000] * 10000) }}",
    "{{ messages[([['x' * 10000] * 10000] * 10000,)].x }}",
    "{% set ns = namespace(unsafe_callable=true, x=[['x' * 10000] * 10000] * 10000) %}{{ ns() }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = [ns] %}{{ ns }}",
    "{% set s = 'x' * 9000000 %}{% set ns = namespace(x=0) %}"
    "{% for i in range(9999) %}{% set ns.x = [ns.x, s[1:]] %}{% endfor %}",
    "{% set s = 'x' * 9000000 %}{% set ns = namespace(x=0) %}"
    "{% for i in range(9999) %}{% set ns.x = [ns.x, s ~ i] %}{% endfor %}",
    "{{ ('x' * 9000000) | list | length }}",
    "{{ ('x ' * 8000000).split(' ') | length }}",
    "{% set ns = namespace(x=0) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x, [" + "0," * 50000 + "]] %}{% endfor %}",
    "{{ " + " ~ ".join(["('x' | center(99999))"] * 5000) + " }}",
    "{{ (':' * 9000000) % 1 }}",
    "{{ ('%' ~ ' ' * 9000000) % 1 }}",
    "{{ ('%(a)' ~ ')' * 9000000) % {'a': 1} }}",
    "{{ ('a' * 9000000).rfind('ab' ~ 'a' * 4000000) }}",
    "{{ ('a' * 9000000).strip('b' * 9000000 ~ 'a') }}",
    "{{ ('a' * 9000000) | trim('b' * 9000000 ~ 'a') }}",
    "{{ ([[1, 2, 3, 4, 5, 6, 7]] * 30000) | sum(start=[]) }}",
    "{% set s = 'A' * 9000000 %}{{ ([s] * 100000) | sort | length }}",
    "{% set s = 'a' * 9000000 %}{{ ([s ~ 'b', s ~ 'c'] * 100000) | sort(case_sensitive=true) | length }}",
    "{% set s = 'a' * 9000000 %}{{ (s ~ 'b') in [s ~ 'c'] * 900000 }}",
    "{% set s = 'a' * 9000000 %}{{ ([s ~ 'c'] * 900000).index(s ~ 'b') }}",
    "{% set s = 'a' * 9000000 %}{{ (s ~ 'b').startswith((s ~ 'c',) * 900000) }}",
    "{% set m = 2 ** 61 - 1 %}{{ {}.fromkeys(range(0, m * 90000, m)) }}",
    *(
        "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}"
        "{% set ns.b = (ns.b, ns.b) %}{% endfor %}{{ " + use + " }}"
        for use in (
            "ns.a == ns.b", "1 < 2 and ns.a in [ns.b]", "ns.a is eq(ns.b)", "[ns.a].count(ns.b)",
            "{ns.a: 1}", "{}.get(ns.a)", "{1: 2}[ns.a]", "[ns.a, ns.b] | unique | list", "[ns.a, ns.b] | max",
            "[ns.a, ns.b] | map('list') | max", "[ns.a] | select('eq', ns.b) | list", "ns.a is filter",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_ends_soon_and_costs_only_the_prompt(template: str) -> None:
    started, tracer = time.process_time(), sys.gettrace()
    with pytest.raises((ChatError, SourceError)):
        ChatTemplate(spec(template)).render(CHAT)
    assert time.process_time() - started < 20
    assert sys.gettrace() is tracer


def test_a_busy_machine_takes_no_time_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a template computes counts: on a busy machine honest ones with many tools were refused."""
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 60.0).__next__)  # a minute passes at each look
    assert ChatTemplate(spec(LLAMA3)).render(CHAT).endswith("<|end_header_id|>\n\n")
