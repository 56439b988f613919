"""SkyPilot: a task whose first hosts are the learner, with Redis, and whose others have workers on all GPUs.

All hosts of a task are alike, and begin and end together. They share no directory: settings and secrets are
copied to each, and workers find the learner's host in SKYPILOT_NODE_IPS, with fixed ports. What the settings
name of this machine's files, the model among them, is copied to the same place. `sky jobs launch` begins a task
again that lost a host; it goes on from its newest checkpoint if the run lies in a bucket.
"""

import shlex
from pathlib import Path
from typing import Any

import msgspec

from areal_q.checks.hub import is_cached
from areal_q.config.load import parsed
from areal_q.errors import ConfigError
from areal_q.launch.cluster import Cluster
from areal_q.launch.place import place_of
from areal_q.plugins import parted
from areal_q.system.run_dir import path_of

_LEARNER = """\
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
if [ "$SKYPILOT_NODE_RANK" -lt {nodes} ]; then
  exec {learner} --head="$head" --rank="$SKYPILOT_NODE_RANK"
fi
gpus=${{SKYPILOT_NUM_GPUS_PER_NODE:-0}}
workers=()
for i in $(seq 0 {each} $((gpus > {each} ? gpus - {each} : 0))); do
  CUDA_VISIBLE_DEVICES=$(seq -s, "$i" $((i + {each} - 1))) \\
    {worker} --head="$head" --id="$SKYPILOT_NODE_RANK-$i" &
  workers+=("$!")
done
code=0
for worker in "${{workers[@]}}"; do wait "$worker" || code=$?; done
exit "$code"
"""

_NAME_FILES = ("path", "heldout", "template_file")
"""Settings that may name a file or a directory"""


def task(cluster: Cluster, gpu: str, bucket: str) -> dict[str, Any]:
    """Returns the task as SkyPilot's YAML has it; `gpu` such as H100 or "", `bucket` where the run is or ""."""
    run, place = cluster.run, cluster.place
    each = max(1, cluster.worker_gpus)
    accelerators = {"accelerators": f"{gpu}:{max(cluster.gpus, each)}"} if gpu else {}
    files = sorted(_files(msgspec.to_builtins(run)))
    mounts: dict[str, Any] = {str(path): str(path) for path in (place, *files)}
    if bucket:
        mounts[str(path_of(run))] = {"name": bucket, "mode": "MOUNT_CACHED"}
    resources = {"cpus": f"{max(cluster.learner_cores, cluster.worker_cores)}+", **accelerators}
    options = dict(parsed(option) for option in cluster.learner_options)
    script = _LEARNER.format(
        nodes=cluster.nodes,
        each=each,
        learner=shlex.join(cluster.role("learner")),
        worker=shlex.join(cluster.role("worker")),
    )
    return {
        "name": run.name,
        "num_nodes": cluster.nodes + cluster.workers,
        "resources": resources | options,
        "file_mounts": mounts,
        # SkyPilot's own `setup` is another shell, whose `source venv/bin/activate` a role would not see.
        "run": f"{cluster.setup}\n{script}" if cluster.setup else script,
    }


def _files(settings: Any) -> set[Path]:
    """Returns the files and directories of this machine that the settings name; of a user's own code, whose
    table has a digest, the directory, since it may import what lies beside it."""
    if isinstance(settings, list | tuple):
        return set().union(*map(_files, settings))
    if not isinstance(settings, dict):
        return set()
    named = (settings.get(name) for name in _NAME_FILES)
    texts = [text for text in named if isinstance(text, str)]
    files = {Path(path) for text in texts for path in (text, parted(text)[0])}
    # A model in the Hub's cache is links, which SkyPilot does not copy: its hosts fetch that commit.
    paths = {path for path in files if path.exists() and not is_cached(path)}
    for link in (one for path in paths if path.is_dir() for one in path.iterdir()):
        if link.is_symlink():
            raise ConfigError(f"{link}: SkyPilot copies no links; put the file itself there")
    own = "digest" in settings
    found = {path.parent if own and path.is_file() else path for path in paths}
    return found.union(*map(_files, settings.values()))


def yaml(table: dict[str, Any]) -> str:
    """Returns `table` as YAML. Strings are written as JSON has them, which is YAML too, those of several lines
    as blocks."""
    return "".join(_lines(table, ""))


def _lines(table: dict[str, Any], indent: str) -> list[str]:
    out = []
    for key, value in table.items():
        name = f"{indent}{key if key.isidentifier() else msgspec.json.encode(key).decode()}:"
        if isinstance(value, dict):
            out += [f"{name}\n", *_lines(value, f"{indent}  ")]
        elif isinstance(value, str) and value.endswith("\n"):
            out += [f"{name} |\n", *(f"{indent}  {line}\n" for line in value.splitlines())]
        else:
            out.append(f"{name} {msgspec.json.encode(value).decode()}\n")
    return out


def write(cluster: Cluster, gpu: str, bucket: str) -> list[Path]:
    """Writes the task to the launch's directory, and returns its path."""
    path = place_of(cluster.run) / "sky.yaml"
    path.write_text(yaml(task(cluster, gpu, bucket)), "utf-8")
    return [path]
