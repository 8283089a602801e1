"""The map of a model's experts as one HTML page that needs nothing else: no script, no font, no address.

In: an ExpertMap.  Out: the page's text; every word that comes from outside is escaped.
"""

from html import escape
from typing import TYPE_CHECKING

from .expert_map import LEVELS, ExpertMap
from .text import one_line

if TYPE_CHECKING:
    from libcolibri.expert_usage import LayerFacts

_LIGHT = ("#eeeeee", "#fdf3c4", "#fde0a0", "#fdc67a", "#fca25f", "#f47d4f", "#dd5550", "#b83a64", "#80266e", "#3b0f70")
_DARK = ("#262626", "#1b1044", "#3b0f70", "#641a80", "#8c2981", "#b73779", "#de4968", "#f7705c", "#fe9f6d", "#fcfdbf")
_STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --mark: #0072b2; --pin: #009e73; LIGHT }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --back: #121212; --mark: #56b4e9; --pin: #2fd3a0; DARK } }
body { font: 14px/1.4 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 1.5em; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { font-weight: normal; text-align: right; padding: 0 0.4em; white-space: nowrap; font-variant-numeric: tabular-nums; }
th.n { width: 3em; } th.f { width: 5em; } td.m { padding: 0; }
.row { display: flex; height: 16px; margin: 1px 0; }
.row i { flex: 1 1 0; min-width: 1px; }
.legend i { display: inline-block; width: 1.6em; height: 1em; vertical-align: middle; }
.r { box-shadow: inset 0 -4px var(--mark); }
.p { box-shadow: inset 0 0 0 2px var(--pin); }
CELLS
"""


def page(shown: ExpertMap) -> str:
    """The whole page; hovering over a cell shows 'layer 3, expert 17: 2.1 %'."""
    name = escape(one_line(shown.name))
    facts = "\n".join(f"<p>{escape(line)}</p>" for line in shown.lines())
    rows = "\n".join(_row(shown, layer, found) for layer, found in shown.usage.facts().items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Experts of {name}</title>
<style>{_style()}</style>
</head>
<body>
<h1>Experts of {name}</h1>
{facts}
<p class="legend">{_legend(shown)}</p>
<table>
<thead><tr><th class="n">layer</th><th>experts 0 to {max(shown.usage.num_experts.values()) - 1}</th><th class="f">quarter</th>
<th class="f">entropy</th><th class="f">unused</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def _style() -> str:
    light, dark = (" ".join(f"--h{level}: {colour};" for level, colour in enumerate(colours)) for colours in (_LIGHT, _DARK))
    cells = "\n".join(f".h{level} {{ background: var(--h{level}); }}" for level in range(LEVELS))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark).replace("CELLS", cells)


def _legend(shown: ExpertMap) -> str:
    words = {0: "never used", 1: "a fifth of the layer's average or less", 5: "average", 9: "five times the average or more"}
    parts = [f'<i class="h{level}"></i> {words.get(level, "")}' for level in range(LEVELS)]
    if shown.budget_bytes is not None:
        parts.append('<i class="h0 r"></i> in memory')
    if shown.pinned:
        parts.append('<i class="h0 p"></i> pinned')
    return "\n".join(parts)


def _row(shown: ExpertMap, layer: int, facts: "LayerFacts") -> str:
    cells = []
    for expert, (share, level) in enumerate(zip(shown.usage.shares()[layer].tolist(), shown.levels(layer).tolist(), strict=True)):
        resident, pinned = (layer, expert) in shown.resident, (layer, expert) in shown.pinned
        classes = f"h{level}" + (" p" if pinned else " r" if resident else "")
        words = f"layer {layer}, expert {expert}: {100 * share:.1f} %"
        words += (", in memory" if resident else "") + (", pinned" if pinned else "")
        cells.append(f'<i class="{classes}" title="{words}"></i>')
    return (
        f'<tr><th>{layer}</th><td class="m"><div class="row">{"".join(cells)}</div></td><td>{100 * facts.hottest_quarter:.0f} %</td>'
        f"<td>{facts.entropy_bits:.2f}</td><td>{facts.unused}</td></tr>"
    )
