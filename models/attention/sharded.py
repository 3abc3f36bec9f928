"""Attention over a device mesh: `shard_map` around the kernels, which cannot be partitioned."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def sharded(attention, runs, mesh, batch, heads):
  """See `models.attention.sharded_attention`, which passes `attention` and `plan.runs`."""
  ways = 1 if heads is None else mesh.shape[heads]

  def check(groups, what):
    if groups % ways:
      raise NotImplementedError(
        f"{groups} kv groups {what} cannot be split over {ways} devices of mesh axis {heads!r}; "
        "shard the batch instead (heads=None), or choose masks whose per-layer counts divide"
      )

  def one_run(q, k, v, windows, positions, segments, options):
    heads_spec = PartitionSpec(batch, None, heads, None)
    arrays, specs = [q, k, v], [heads_spec] * 3
    if not isinstance(windows, tuple):
      arrays.append(windows)
      specs.append(PartitionSpec(heads) if windows.ndim == 1 else PartitionSpec(batch, heads))
    places = {"positions_BxT": positions, "segments_BxT": segments}
    places = {name: x for name, x in places.items() if x is not None}
    arrays += places.values()
    specs += [PartitionSpec(batch, None)] * len(places)

    def local(q, k, v, *rest):
      # All heads of a run have one window, so a shard's row is its share of the run's.
      if isinstance(windows, tuple):
        row = windows[: q.shape[2]]
      else:
        row, *rest = rest
      return attention(q, k, v, row, **dict(zip(places, rest, strict=True)), **options)

    run = jax.shard_map(
      local, mesh=mesh, in_specs=tuple(specs), out_specs=heads_spec, check_vma=False
    )
    return run(*arrays)

  def call(q, k, v, windows, *, positions_BxT=None, segments_BxT=None, **options):
    G = k.shape[2]
    R = q.shape[2] // G
    if ways == 1 or not isinstance(windows, tuple):
      check(G, "in all")
      return one_run(q, k, v, windows, positions_BxT, segments_BxT, options)
    outs = []
    for first, stop, window in runs(windows, G):
      check(stop - first, f"with window {window}")
      outs.append(
        one_run(
          q[:, :, first * R : stop * R],
          k[:, :, first:stop],
          v[:, :, first:stop],
          (window,) * ((stop - first) * R),
          positions_BxT,
          segments_BxT,
          options,
        )
      )
    return jnp.concatenate(outs, axis=2)

  return call
