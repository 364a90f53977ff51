"""Decode, score, keep: threads decode ahead (each through a process of its own) while rewards work on the batch before.

Batches are cut from the list of tasks once and for all: value and order of the rows depend neither on the number of
workers nor on where a command was stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arvideo_rl.decoding import Reading, Video, VideoError, decode
from arvideo_rl.scoring import pairs as pairing
from arvideo_rl.scoring.inputs import Problem, Task
from arvideo_rl.scoring.journal import Journal, Row, place
from arvideo_rl.scoring.measure import score_batch
from arvideo_rl.scoring.settings import DEFAULT, Job, ScoreConfig, prepare
from arvideo_rl.scoring.summary import summarise
from arvideo_rl.scoring.tables import write

FLOAT = 4  # bytes of one pixel's channel where rewards see it


@dataclass
class Result:
    """Rows, one a clip and reward, in the order of the clips; and what they come to."""

    rows: list[Row]
    summary: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)  # decoding (summed over workers), waiting for it, scoring,
    # and all by the clock
    resumed: int = 0  # clips whose rows an earlier command had left
    pairs: list[Row] = field(default_factory=list)  # best and worst of each prompt, where they were asked for


def score_videos(videos: str | Path | Sequence[str | Path], reward: Any = DEFAULT, **keys: Any) -> Result:
    """Score files, folders, globs or manifests; ``keys`` are those of :class:`ScoreConfig`.

    ``reward``: a name, several in a list, a function ``clips -> Tensor [B]``, or a reward object. Raises ConfigError
    or ValueError before anything is scored; a clip that cannot be scored is a row with a reason.
    """
    words = [str(v) for v in ([videos] if isinstance(videos, (str, Path)) else videos)]
    if isinstance(reward, (list, tuple)) and all(isinstance(r, str) for r in reward):
        reward = ",".join(reward)
    if isinstance(reward, str):
        return run(prepare(ScoreConfig(reward=reward, **keys), words))
    own = {getattr(r, "name", getattr(r, "__name__", "reward")): r for r in _listed(reward)}
    return run(prepare(ScoreConfig(reward=",".join(own), **keys), words, own))


def _listed(reward: Any) -> Sequence[Any]:
    return reward if isinstance(reward, (list, tuple)) else [reward]


def run(job: Job, tell: Callable[[int], None] = lambda clips: None) -> Result:
    """Score what is not scored yet, and write it if the job says where. ``tell`` hears of every number of clips that
    are done. A KeyboardInterrupt leaves finished rows beside the output and says so."""
    out = Path(job.config.out) if job.config.out else None
    journal = Journal(out, job.settings) if out else None
    seconds = {"decoding": 0.0, "waiting": 0.0, "scoring": 0.0, "clock": 0.0}
    began = time.perf_counter()
    keys = [t.key for t in job.tasks]
    rows: dict[str, list[Row]] = {}
    for row in journal.rows if journal else []:
        rows.setdefault(row["key"], []).append(row)
    rows = {k: rows[k][-len(job.rewards) :] for k in keys if k in rows}  # of those that were tried again the last
    rows = {k: some for k, some in rows.items() if not any(r["reason"].startswith("system:") for r in some)}
    resumed = len(rows)
    tell(resumed)
    try:
        with closing(_decoded(job, keys, rows, seconds)) as batches:
            for batch in batches:
                start = time.perf_counter()
                made = score_batch(job, [(task, seen) for _, task, seen in batch])
                seconds["scoring"] += time.perf_counter() - start
                for (key, _, _), some in zip(batch, made):
                    rows[key] = [{"key": key, **row} for row in some]
                if journal:
                    journal.add([row for key, _, _ in batch for row in rows[key]])
                tell(len(batch))
    except KeyboardInterrupt:
        if out is None:
            raise KeyboardInterrupt("interrupted; with out=scores.csv the same command would go on from here") from None
        done = f"{len(rows)} of {len(keys)} files are in {place(out)}"
        raise KeyboardInterrupt(f"interrupted; {done}; the same command goes on from there") from None
    finally:
        if journal:
            journal.close()
    seconds["clock"] = time.perf_counter() - began
    flat = [{k: v for k, v in row.items() if k != "key"} for key in keys for row in rows[key]]
    summary = summarise(flat, list(job.rewards), bool(job.config.compare))
    pairs: list[Row] = []
    if job.config.pairs:
        by = job.config.pairing.reward or next(iter(job.rewards))
        pairs, summary["pairs"] = pairing.make(job.tasks, [rows[key] for key in keys], by, job.config.pairing)
        pairing.write(Path(job.config.pairs), pairs)
    if out and journal:
        write(out, flat, summary)
        journal.remove()
    return Result(flat, summary, seconds, resumed, pairs)


Seen = Video | Problem


def _decoded(
    job: Job, keys: list[str], done: Mapping[str, Any], seconds: dict[str, float]
) -> Generator[list, None, None]:
    """Batches of (key, task, video or problem), those of ``done`` left out; decoded ahead by one batch at most."""
    size = job.config.batch
    cut = [list(range(i, min(i + size, len(keys)))) for i in range(0, len(keys), size)]
    batches = [left for some in cut if (left := [i for i in some if keys[i] not in done])]
    order = [i for batch in batches for i in batch]
    ahead: deque[Future[tuple[Seen, float]]] = deque()
    pool = ThreadPoolExecutor(job.config.workers, thread_name_prefix="decode")
    try:
        sent = 0
        for batch in batches:
            out = []
            for i in batch:
                while sent < len(order) and len(ahead) < size + job.config.workers:
                    ahead.append(pool.submit(_see, job.tasks[order[sent]], job.config))
                    sent += 1
                began = time.perf_counter()
                seen, took = ahead.popleft().result()
                seconds["waiting"] += time.perf_counter() - began
                seconds["decoding"] += took
                out.append((keys[i], job.tasks[i], seen))
            yield out
    finally:
        pool.shutdown(cancel_futures=True)


def _see(task: Task, config: ScoreConfig) -> tuple[Seen, float]:
    """Decode one clip; (what was seen or why not, seconds)."""
    start = time.perf_counter()
    how = Reading(
        fps=task.fps, frames=config.frames, sample_fps=config.sample_fps, short_side=config.short_side,
        most=int(config.gib * 2**30 / FLOAT), seconds=config.seconds,
    )  # fmt: skip
    seen: Seen
    try:
        seen = task.problem or decode(task.path, how)
    except VideoError as error:
        seen = (error.kind, error.message)
    except MemoryError:
        seen = ("system:out_of_memory", "no memory to decode it; lower gib, batch or workers, or set short_side")
    except (OSError, ValueError) as error:
        seen = ("system:not_readable", " ".join(str(error).split()))
    return seen, time.perf_counter() - start
