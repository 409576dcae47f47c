"""Run a real ComfyUI with this extension in temporary folders, and end it together with everything it started."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from scripts import install, processes
from scripts.comfy_api import ComfyClient
from scripts.comfy_paths import ROOT

CPU_SHIM = ROOT / "scripts" / "cpu_shim"


class StartFailed(Exception):
    """ComfyUI ended or did not answer. The text has the end of its log."""


def free_port() -> int:
    """A free TCP port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class ComfyServer:
    """A ComfyUI process with the extension linked into a temporary base folder.

    It writes nothing into the ComfyUI checkout. Its files are in ``home``, a folder with a short path, because Unix
    socket paths are limited in length and the backend's socket is in there.

    Args:
        comfyui: the ComfyUI checkout.
        output: where its output nodes write; by default a folder in ``base``.
        frontend: the folder of the web page to serve; without it only the API works.
        cpu: whether to start ComfyUI with ``--cpu``.
        env: variables to add to this process's environment.
        arguments: more command-line arguments for ComfyUI.

    Attributes:
        home: the temporary folder, which ``stop`` removes.
        base: ComfyUI's base folder inside it: models, custom_nodes, input, user.
        runtime: ``PARALLEL_DIT_RUNTIME``, the folder of the backend's socket and logs.
        log: the file with everything that ComfyUI prints.
        client: a client of its API.
    """

    def __init__(
        self,
        comfyui: Path,
        *,
        output: Path | None = None,
        frontend: Path | None = None,
        cpu: bool = True,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.comfyui = comfyui
        self.home = Path(tempfile.mkdtemp(prefix="pdit-", dir="/tmp"))
        self.base = self.home / "base"
        self.runtime = self.home / "runtime"
        self.output = output or self.base / "output"
        self.log = self.home / "comfyui.log"
        self.port = free_port()
        self.client = ComfyClient(f"http://127.0.0.1:{self.port}")
        self.extension = self.base / "custom_nodes" / "comfyui-parallel-dit"
        self._frontend = frontend or self.home / "no-frontend"
        self._cpu, self._arguments = cpu, tuple(arguments)
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, deadline: float = 120.0) -> "ComfyServer":
        """Start ComfyUI and wait until its API answers.

        Raises:
            StartFailed: it ends, or does not answer within ``deadline`` seconds.
        """
        self._create_folders()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self.home, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=processes.end_with_parent,
            )  # fmt: skip
        self._wait_for_api(deadline)
        return self

    def _create_folders(self) -> None:
        """Create ComfyUI's folders, with a link to this checkout among its extensions."""
        for folder in (self.extension.parent, self.base / "models", self.output, self._frontend):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.extension.exists():
            self.extension.symlink_to(ROOT, target_is_directory=True)

    def environment(self) -> dict[str, str]:
        """ComfyUI's environment. A command that runs with it talks to this server's backend."""
        env = {
            **os.environ,
            processes.RUNTIME: str(self.runtime),
            processes.SETTINGS: str(self.home / "settings.json"),
            "HF_HUB_OFFLINE": "1",
        }
        if "PYTHONPYCACHEPREFIX" not in env:
            env["PYTHONDONTWRITEBYTECODE"] = "1"  # keeps the checkout clean
        behind = str(CPU_SHIM) if self._cpu else os.environ.get("PYTHONPATH", "")
        env["PYTHONPATH"] = os.pathsep.join([str(install.packages_folder(self.comfyui)), behind])
        return {**env, **self._env}

    @property
    def pid(self) -> int:
        """ComfyUI's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def log_text(self) -> str:
        """Everything ComfyUI has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def end_comfyui(self) -> None:
        """End ComfyUI but not the backend. ``start`` starts ComfyUI again."""
        if self._process is not None:
            processes.end_group(self._process)
            self._process = None

    def stop(self) -> list[str]:
        """End ComfyUI and the backend, and remove ``home``.

        Returns:
            One line for each process that did not end by itself and was killed. A test fails if there are any.
        """
        self.end_comfyui()
        try:
            processes.stop_backend(self.runtime)
        finally:
            remaining = processes.wait_for_exit(self.runtime, 15.0)
            descriptions = processes.describe(remaining).splitlines()
            processes.kill(remaining)
            shutil.rmtree(self.home, ignore_errors=True)
        return descriptions

    def __enter__(self) -> "ComfyServer":
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        command = [
            sys.executable, str(self.comfyui / "main.py"), "--listen", "127.0.0.1", "--port", str(self.port),
            "--base-directory", str(self.base), "--output-directory", str(self.output),
            "--database-url", f"sqlite:///{self.home}/comfyui.db", "--disable-auto-launch", "--disable-api-nodes",
        ]  # fmt: skip
        if self._cpu:
            command.append("--cpu")
        return [*command, "--front-end-root", str(self._frontend), *self._arguments]

    def _wait_for_api(self, deadline: float) -> None:
        assert self._process is not None
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise StartFailed(f"ComfyUI ended with status {self._process.returncode}:\n{self.log_text()[-3000:]}")
            try:
                self.client.get("/system_stats", deadline=5.0)
                return
            except OSError:
                time.sleep(0.2)
        raise StartFailed(f"ComfyUI did not answer within {deadline:g} s:\n{self.log_text()[-3000:]}")
