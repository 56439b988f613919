"""Builds the teacher that the settings name."""

import threading
from collections.abc import Callable

from areal_q.checks.machine import check_device
from areal_q.checks.model import check_teacher
from areal_q.config import ModelTeacher, Run, ServerTeacher
from areal_q.models import load_frozen
from areal_q.tasks import Tokenizer
from learner.teacher.model_beside import ModelBeside
from learner.teacher.scoring import Teacher
from learner.teacher.server import Server


def build_teacher(
    run: Run, tokenizer: Tokenizer, alive: Callable[[], None], stop: threading.Event
) -> Teacher | None:
    """Returns the teacher, or None if there is none; `alive` is called while it scores, which `stop` ends.
    Raises ConfigError, CheckpointError or TeacherUnavailable for one that cannot teach this student, and
    Stopped if `stop` was set meanwhile."""
    match run.learner.teacher:
        case None:
            return None
        case ModelTeacher(path=path):
            check_teacher(path, tokenizer)
            check_device("learner.device", run.learner.device)
            return ModelBeside(load_frozen(path), run.learner, run.rollout.sampling.temperature)
        case ServerTeacher() as cfg:
            return Server(cfg, alive, stop)
