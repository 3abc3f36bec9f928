import dataclasses
import json

from benchmarks import output


@dataclasses.dataclass(frozen=True)
class Options:
  out: str
  lengths: tuple[int, ...] = (8, 16)


def test_figures_go_to_a_new_folder_with_what_they_were_measured_on(tmp_path):
  options = Options(str(tmp_path / "a" / "b"))
  records = [{"tokens": 8, "seconds": 0.5}]
  folder = output.write(options.out, "pace", output.with_platform(options, records))
  assert [path.name for path in folder.iterdir()] == ["pace.json"]
  written = json.loads((tmp_path / "a" / "b" / "pace.json").read_text())
  assert written["records"] == records and written["options"]["lengths"] == [8, 16]
  assert written["platform"] == "cpu" and written["jax"]
