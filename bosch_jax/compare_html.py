"""report.html: the whole comparison in one file that opens without a network and without scripts."""

import base64
import html
import pathlib

from bosch_jax.compare_report import overview, sections

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #d9e2ec; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; } td.near { background: #eef4f9; }
img { max-width: 100%; height: auto; }
"""


def page(folder: pathlib.Path, result: dict) -> str:
  """The report as HTML.

  Args:
    folder: where the pictures are.
    result: see `compare_report.summary`.
  """
  title = html.escape(f"Head selection methods on {result['model']}")
  parts = [
    "<!doctype html>",
    '<html lang="en">',
    f'<head><meta charset="utf-8"><title>{title}</title>',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    '<link rel="icon" href="data:,">',  # none, and none is asked for
    f"<style>{STYLE}</style></head>",
    f"<body><h1>{title}</h1>",
    f"<p>{html.escape(overview(result))}</p>",
  ]
  for heading, text, table, picture in sections(result):
    parts.append(f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>")
    if table:
      parts.append(_table(table))
    if picture:
      data = base64.b64encode((folder / picture).read_bytes()).decode()
      parts.append(f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">')
    parts.append("</section>")
  return "\n".join([*parts, "</body></html>", ""])


def _table(rows: list[list[str]]) -> str:
  header, *body = rows
  head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
  lines = ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in body]
  return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(text: str) -> str:
  kind = {"*": ' class="best"', "~": ' class="near"'}.get(text[-1:], "")
  return f"<td{kind}>{html.escape(text)}</td>"
