"""Tables, plots and the report of a comparison, from cells written by hand."""

import dataclasses
import html.parser
import json
import shutil

import numpy as np
import pytest

from bosch_jax import compare, compare_report, compare_settings, recovery, runs
from bosch_jax.compare_settings import CompareSettings, RecoveryOptions
from models.errors import InputError
from models.windows import HeadMask, write_json

METHODS = ("bosch", "rand", "nll")
RATIOS = (0.25, 0.5)
LAYERS, GROUPS, CONTEXTS = 4, 2, 5
# Local groups of each method at the two ratios, as indices into [L, G] laid flat.
LOCAL = {
  "bosch": ([0, 1], [0, 1, 2, 3]),
  "rand": ([0, 7], [4, 5, 6, 7]),
  "nll": ([0, 1], [0, 1, 2, 7]),
}
NLL = {"bosch": (0.1, 0.3), "rand": (1.0, 2.0), "nll": (0.1, 0.5)}


def held(values):
  made = {"n": 4 * len(values), "nll": float(np.mean(values)), "nll_se": 0.01}
  made |= {"exact_match": 0.5, "exact_match_se": 0.1}
  return made | {"by_context": {"nll": list(values), "exact_match": [0.5] * len(values)}}


def noise(seed):
  """What the contexts of a seed share, whatever the method."""
  return np.random.default_rng(seed).normal(0, 0.05, CONTEXTS)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """A finished comparison of three methods, two ratios and two seeds."""
  patch = pytest.MonkeyPatch()
  patch.setattr(compare_settings, "known_methods", lambda: METHODS)
  folder = tmp_path_factory.mktemp("compare")
  made = CompareSettings(ratios=RATIOS, seeds=2, out=folder)
  for method, seed in made.cells:
    for i, ratio in enumerate(RATIOS):
      cell = compare_report.cell_folder(made, method, seed, ratio)
      cell.mkdir(parents=True)
      local = np.zeros(LAYERS * GROUPS, int)
      local[LOCAL[method][i]] = 1
      (cell / "mask.json").write_text(json.dumps({"swa": local.reshape(LAYERS, GROUPS).tolist()}))
      result = {
        "model": "tiny <b>",
        "fingerprint": "f",
        "num_groups": LAYERS * GROUPS,
        "num_local": int(local.sum()),
        **{"window": 8, "sinks": 0, "context": 64, "score": "nll"},
        **{"task": "multikey", "haystack": "noise", "warning": None},
        "held_out": {
          "full": held(0.05 + noise(seed)),
          "all_local": held(4 + noise(seed)),
          "mask": held(NLL[method][i] + noise(seed)),
        },
        "cost": {"full_forward_equivalents": 10.0 * (i + 1), "alone": 30.0 - 4 * i}
        | {"cpu_seconds": 7, "masks_scored": 3},
      }
      (cell / "result.json").write_text(json.dumps(result))
  yield made
  patch.undo()


@pytest.fixture(scope="module")
def result(settings):
  made = compare_report.summary(settings)
  compare.write(settings.folder, made)
  return made


def test_means_pool_the_contexts_of_all_seeds(result):
  entry = result["table"]["bosch"]["0.5"]
  values = np.concatenate([0.3 + noise(1), 0.3 + noise(2)])
  assert entry["contexts"] == 2 * CONTEXTS
  assert entry["nll"] == pytest.approx(values.mean())
  assert entry["nll_se"] == pytest.approx(values.std(ddof=1) / np.sqrt(len(values)))
  means = [0.3 + noise(seed).mean() for seed in (1, 2)]
  assert entry["nll_seed_sd"] == pytest.approx(np.std(means, ddof=1))
  assert result["anchors"]["all_local"]["nll"] == pytest.approx(values.mean() + 3.7)


def test_paired_differences_cancel_what_the_contexts_share(result):
  difference = result["paired"]["nll"]["0.5"]
  assert difference["nll"] == pytest.approx(0.2)
  assert difference["nll_se"] == pytest.approx(0, abs=1e-9)
  assert result["table"]["nll"]["0.5"]["nll_se"] > 0.005


def test_turnover_and_distances_by_hand(result):
  assert result["turnover"]["bosch"] == {"0.25-0.5": pytest.approx(1 - 2 / np.sqrt(8))}
  assert result["turnover"]["rand"] == {"0.25-0.5": pytest.approx(1 - 1 / np.sqrt(8))}
  # bosch, rand, nll at 0.5: nothing shared; 3 of 5; 1 of 7.
  distances = [[0, 1, 1 - 3 / 5], [1, 0, 1 - 1 / 7], [1 - 3 / 5, 1 - 1 / 7, 0]]
  np.testing.assert_allclose(result["jaccard"]["0.5"], distances)
  mask = HeadMask(np.reshape([1, 1, 0, 0, 0, 0, 0, 0], (LAYERS, GROUPS)))
  np.testing.assert_array_equal(result["local"]["bosch"]["0.25"], mask.local)


def test_costs_are_those_of_whole_runs_and_of_a_ratio_alone(result):
  cost = result["cost"]["nll"]
  assert (cost["full_forward_equivalents"], cost["cpu_seconds"]) == (30.0, 7)
  assert cost["alone"] == {"0.25": 30.0, "0.5": 26.0}
  rows = {row[0]: row[1:] for row in compare_report.cost_rows(result)}
  assert rows["NLL"] == ["30.0", "28.0", "3", "7"]


def test_the_best_of_a_column_is_marked_and_what_is_as_good(result):
  rows = {row[0]: row[1:] for row in compare_report.method_rows(result, "nll")}
  assert list(rows) == ["method", "full attention", "all local", "BOSCH", "RAND", "NLL"]
  assert rows["BOSCH"][0].endswith("*") and rows["NLL"][0].endswith("*")  # equal
  assert rows["BOSCH"][1].endswith("*") and rows["NLL"][1][-1] not in "*~"
  assert result["best"] == {"0.25": "bosch", "0.5": "bosch"}


def test_markdown_has_every_table_and_picture(result, settings):
  text = (settings.folder / "compare.md").read_text()
  assert "| method | 0.25 local | 0.5 local |" in text and "| RAND | 0.65 |" not in text
  for heading in ("Held-out exact match", "Paired differences", "Head turnover", "Masks"):
    assert f"## {heading}" in text
  for name in ("cost.png", "masks.png", "jaccard.png"):
    assert f"({name})" in text and (settings.folder / name).stat().st_size > 5000


class Page(html.parser.HTMLParser):
  """Tags that are open, and everything a page would fetch or run."""

  def __init__(self):
    super().__init__()
    self.open, self.images, self.fetched, self.cells = [], [], [], 0

  def handle_starttag(self, tag, attrs):
    if tag not in ("meta", "link", "img"):
      self.open.append(tag)
    values = dict(attrs)
    self.images += [values["src"]] if tag == "img" else []
    self.fetched += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]
    self.fetched += [tag] if tag in ("script", "iframe") else []
    self.cells += tag == "td"

  def handle_endtag(self, tag):
    assert self.open.pop() == tag


def test_the_report_is_one_file_that_fetches_and_runs_nothing(result, settings):
  text = (settings.folder / "report.html").read_text()
  page = Page()
  page.feed(text)
  assert not page.open and not page.fetched and "url(" not in text and "@import" not in text
  assert len(page.images) == 3
  assert all(image.startswith("data:image/png;base64,iVBOR") for image in page.images)
  assert page.cells > 40 and "tiny &lt;b&gt;" in text and "tiny <b>" not in text


def test_the_report_in_a_browser(result, settings, tmp_path):
  """No console message, no request, all pictures shown, nothing wider than the window."""
  playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
  chromium = shutil.which("chromium") or shutil.which("google-chrome")
  if not chromium:
    pytest.skip("no chromium on this machine (apt-get install chromium)")
  shutil.copy(settings.folder / "report.html", tmp_path / "alone.html")
  with playwright.sync_playwright() as p:
    browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 900, "height": 700}, offline=True)
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "alone.html").as_uri())
    images = page.evaluate(
      "Array.from(document.images, i => i.complete && i.naturalWidth > 100 && i.width > 100)"
    )
    wide = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    rows = page.locator("table").first.locator("tbody tr").count()
    browser.close()
  assert messages == [] and images == [True] * 3 and not wide
  assert [url for url in requests if not url.startswith("data:")] == [
    (tmp_path / "alone.html").as_uri()
  ]
  assert rows == 2 + len(METHODS)


def test_recovery_is_a_section_with_a_picture(result, settings, tmp_path):
  """Three methods: one that closes its gap, one that never closes half of it, one that had none."""
  losses = {"bosch": (1.0, 0.4, 0.2), "rand": (2.0, 1.9, 1.8), "nll": (0.05, 0.04, 0.03)}
  full = {"text_nll": 3.0, "retrieval_nll": 0.1, "retrieval_exact": 0.84}
  runs = {
    method: {
      **{"updates": 8, "tokens": 12_000, "window": 8, "num_local": 4, "seconds_per_update": 1.0},
      "full": {"step": 0, "model": "full", **full},
      "points": [
        {"step": step, "text_nll": 3.5, "retrieval_nll": nll, "retrieval_exact": 0.25}
        for step, nll in zip((0, 4, 8), values, strict=True)
      ],
    }
    for method, values in losses.items()
  }
  made = recovery.summary(0.5, runs)
  assert made["full"] == full
  assert made["methods"]["bosch"]["gap_closed"] == pytest.approx(8 / 9)
  assert [made["methods"][method]["half_at"] for method in losses] == [4, None, None]
  assert made["methods"]["nll"]["gap_closed"] is None
  compare.write(tmp_path, result | {"recovery": made})
  lines = (tmp_path / "compare.md").read_text().splitlines()
  assert "| BOSCH | 1.000 | 0.200 | 89% | 4 | 25% | 3.500 | 3.500 |" in lines
  assert "| RAND | 2.000 | 1.800 | 11% | - | 25% | 3.500 | 3.500 |" in lines
  assert "| full attention | 0.100 |  |  |  | 84% | 3.000 |  |" in lines
  assert (tmp_path / "recovery.png").stat().st_size > 5000
  page = Page()
  page.feed((tmp_path / "report.html").read_text())
  assert not page.open and not page.fetched and len(page.images) == 4
  assert not (settings.folder / "recovery.png").exists()  # of a comparison without training
  # A comparison gone on with may be of other methods.
  write_json(tmp_path / recovery.RESULT, made)
  for methods in (("nll", "rand"), ("rand",)):
    fewer = dataclasses.replace(settings, methods=methods, out=tmp_path)
    assert set(recovery.load(fewer)["recovery"]["methods"]) == set(methods)
  del made["methods"]["nll"], made["methods"]["rand"]
  write_json(tmp_path / recovery.RESULT, made)
  assert recovery.load(fewer) == {}


def test_one_ratio_and_one_method_make_a_report_too(settings, tmp_path):
  one = CompareSettings(ratios=(0.5,), methods=("nll",), seeds=1, out=tmp_path)
  source = compare_report.cell_folder(settings, "nll", 1, 0.5)
  shutil.copytree(source, compare_report.cell_folder(one, "nll", 1, 0.5))
  made = compare_report.summary(one)
  compare.write(tmp_path, made)
  assert made["reference"] == "nll" and made["table"]["nll"]["0.5"]["nll_seed_sd"] is None
  assert "Jaccard" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"methods": ("best",)}, "--methods best"),
    ({"methods": ()}, "--methods"),
    ({"ratios": (0.0,)}, "--ratios 0.0"),
    ({"ratios": ()}, "--ratios"),
    ({"seeds": 0}, "--seeds 0"),
    ({"window": 0}, "--window 0"),
  ],
)
def test_bad_settings_are_named(changes, named):
  with pytest.raises(InputError) as error:
    CompareSettings(**changes)
  assert str(error.value).startswith(named)


def test_the_default_folder_does_not_depend_on_methods_and_seeds():
  made = [CompareSettings(methods=m, seeds=s) for m, s in ((("all",), 3), (("nll",), 1))]
  assert made[0].folder == made[1].folder != CompareSettings(ratios=(0.5,)).folder
  assert made[0].folder.name == "compare-smollm2-135m-r0.25+0.5+0.75+0.875-w32-c256"


@pytest.mark.parametrize(
  ("ratios", "asked", "trained"),
  [((0.5, 0.75, 0.875), 0.0, 0.75), ((0.25, 0.5), 0.0, 0.5), ((0.5, 0.75), 0.5, 0.5)],
)
def test_which_ratio_is_trained(ratios, asked, trained):
  options = RecoveryOptions(cpt=True, cpt_ratio=asked)
  made = CompareSettings(ratios=ratios, methods=("rand",), recovery=options)
  assert made.recovery_ratio == trained
  assert runs.as_json(made) == runs.as_json(dataclasses.replace(made, recovery=RecoveryOptions()))


def test_cells_are_select_runs_with_the_same_settings(settings):
  made = CompareSettings(
    ratios=(0.75, 0.5, 0.75), seeds=2, methods=("RAND,nll",), budget=9, out=settings.out
  )
  assert (made.ratios, made.methods) == ((0.5, 0.75), ("rand", "nll"))
  assert made.cells == [("rand", 1), ("nll", 1), ("rand", 2), ("nll", 2)]
  cell = made.cell("nll", 2)
  assert (cell.ratio, cell.method, cell.seed, cell.budget) == ((0.5, 0.75), "nll", 2, 9)
  assert cell.folder == settings.folder / "cells" / "nll-s2"
