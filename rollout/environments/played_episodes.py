"""Episodes that verifiers plays, in a process of its own that this worker starts, and starts again.

`areal_q/tasks/environments/verifiers_player.py` is that process: it plays at the worker's endpoint, as any
agent of the user's own does (external.py).
"""

import asyncio
import logging
import os
from contextlib import suppress

from areal_q.checks.hub import fetched
from areal_q.config import PretrainedModel, Run, VerifiersEnvironment, VerifiersTask
from areal_q.decode_errors import in_words
from areal_q.system.local_requests import environment_without_proxy
from areal_q.system.processes import die_with_parent
from areal_q.tasks.environments.verifiers_rows import command_of, python_of, told_of
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes

logger = logging.getLogger(__name__)
_PAUSE_S = 1.0
"""Seconds from an end of the process to the next start; doubled each time, up to 32"""


class PlayedEpisodes(Episodes):
    """An environment between `begin_playing` and `end_playing`."""

    plays_itself = True

    def __init__(self, run: Run, client: EngineClient, cfg: VerifiersEnvironment) -> None:
        super().__init__(run, client, cfg)
        self._run, self._player = run, cfg
        self._keeper: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None
        """The supervisor of the one that plays (areal_q/system/processes.py)"""

    def begin_playing(self, url: str, model: str, token: str) -> None:
        task, run = self._run.task, fetched(self._run)
        assert isinstance(task, VerifiersTask) and isinstance(run.model, PretrainedModel)
        told = told_of(
            task,
            endpoint=url,
            token=token,
            model=model,
            model_path=os.path.abspath(run.model.path),
            renderer=task.renderer,
            episodes=self._player.episodes,
        )
        environment = environment_without_proxy(url)
        self._keeper = asyncio.create_task(
            self._keep(command_of(python_of(task)), told, environment)
        )

    async def end_playing(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self, command: list[str], told: bytes, environment: dict[str, str]) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                why = f"the process ended ({await self._code(command, told, environment)})"
            except OSError as error:  # no more processes, say
                why = f"{command[0]}: cannot be run: {in_words(error)}"
            lost = await self._lost(why)
            said = "verifiers: %s; %d episodes begin again; it is started again in %.0f s"
            logger.warning(said, why, lost, pause_s)
            pause_s = min(2 * pause_s, 32.0) if not lost else _PAUSE_S
            await asyncio.sleep(pause_s)

    async def _code(self, command: list[str], told: bytes, environment: dict[str, str]) -> int:
        """Returns the exit code of a process, which has ended then even if this is cancelled."""
        self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
            env=environment,
        )
        try:
            assert self.process.stdin is not None
            with suppress(ConnectionError):
                self.process.stdin.write(told)
                await self.process.stdin.drain()
            return await self.process.wait()
        finally:
            with suppress(ProcessLookupError):
                self.process.terminate()
            await self.process.wait()

    async def _lost(self, why: str) -> int:
        """Begins the episodes of the process that ended again; those that have had their attempts fail. Returns
        their number."""
        self.failure = why
        played = [*self._played.values()]
        for episode in played:
            while episode.busy:  # until its connection is seen to be closed
                episode.freed.clear()
                await episode.freed.wait()
            if not self.plays(episode.id):
                continue  # lost meanwhile, with its ticket
            if not self._next_attempt(episode):
                self.fail(episode, "killed", why)
        return len(played)
