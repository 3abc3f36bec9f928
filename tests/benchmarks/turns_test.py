import pytest

from benchmarks.turns import Contender, Turns


@pytest.fixture
def pair():
  order = []

  def make(name, work):
    return Contender(lambda: order.append(name) or work)

  return make("a", 2.0), make("b", 5.0), order


def test_turns_come_in_order_and_as_often_as_the_longer_work_allows(pair):
  a, b, order = pair
  turns = Turns([a, b], every=1.0)
  for cpu in (0.75, 0.5, 0.0, 1.5, 1.25):  # due after 1, 2, 3 and 4 seconds
    turns.worked(cpu)
  assert order == ["a", "b", "a", "b"]
  assert (a.done, b.done) == (4.0, 10.0)


def test_whoever_had_no_turn_gets_one_in_the_end(pair):
  a, b, order = pair
  turns = Turns([a, b], every=1.0)
  turns.worked(1.0)
  turns.finish()
  assert order == ["a", "b"]
  turns.finish()
  assert order == ["a", "b"]


def test_the_clock_runs_during_a_turn_only():
  contender = Contender(lambda: sum(range(200_000)) and 1.0)
  contender.turn()
  wall, cpu = contender.wall, contender.cpu
  assert wall > 0 and cpu > 0
  sum(range(200_000))
  assert (contender.wall, contender.cpu) == (wall, cpu)
