"""A test double of an SGLang server: its routes, and whatever can go wrong behind them."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web
from safetensors.torch import load_file

from rl_backends.tensors import NamedTensorSink
from rl_hosting.worker_refits import TORN, WorkerRefits

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FakeSglangServer"]


_REFUSED = {"refuse": "too long", "torn": f"{TORN}the last refit failed"}


@dataclass
class FakeSglangServer:
    """Serves one model; token t of a row is ``(sum of the prompt + t) % 200 + 10``.

    Attributes:
        model: Directory of the checkpoint.
        key: The API key that it wants, if any.
        server_info: Overrides of ``/server_info``.
        model_info: Overrides of ``/model_info``.
        fault: What happens to ``/generate``: "hang", "500", "nonsense", "no event", "hang up",
            "nan", "short", "abort", "refuse", "torn".
        raw: Log-probs are of the logits whatever the temperature.
        token_s: Seconds for a token.
        context: Tokens.
        deaf: No route answers.
        tokens: Decoded so far.
        paused: Somebody paused it.
        moved: The address to which it redirects all requests, if any.
        turns: Each answer is another server's.
    """

    model: Path
    key: str | None = None
    server_info: dict[str, Any] = field(default_factory=dict)
    model_info: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    raw: bool = False
    token_s: float = 0.0
    context: int = 256
    deaf: bool = False
    tokens: int = 0
    paused: bool = False
    moved: str = ""
    turns: bool = False

    def __post_init__(self) -> None:
        config = json.loads((self.model / "config.json").read_text())
        self._config = config
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.starts = 0
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.flushes = 0
        self.headers: list[str | None] = []

    # -- from the tests' thread -------------------------------------------------------------------

    def start(self) -> FakeSglangServer:
        """Starts it, with the weights of the checkpoint, on the same port as before."""
        self.starts += 1
        self.weight_version, self.weight_path = "default", str(self.model)
        self.aborted, self.running = [], set()
        self.tensors = {
            name: tensor.clone()
            for name, tensor in load_file(self.model / "model.safetensors").items()
        }
        self.tensors["lm_head.weight"] = self.tensors["model.embed_tokens.weight"]
        self._refits = WorkerRefits(
            lambda: NamedTensorSink(self.tensors), "fake worker", shared=True
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)
        return self

    def stop(self) -> None:
        """Ends it at once, connections and all. Idempotent."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            for transport in list(self._transports):
                transport.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # -- in its thread ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._transports: set[Any] = set()

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> Any:
            self._transports.add(request.transport)
            self.headers.append(request.headers.get("Authorization"))
            if self.key is not None and self.headers[-1] != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            if self.moved:
                raise web.HTTPFound(self.moved)
            if self.deaf:
                await asyncio.sleep(3600)
            return await handler(request)

        app = web.Application(middlewares=[guard], client_max_size=1 << 26)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/set_internal_state", self._frame)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _model_info(self, request: web.Request) -> web.Response:
        said = {
            "model_path": self.weight_path,
            "is_generation": True,
            "weight_version": self.weight_version,
            "model_type": self._config["model_type"],
            "architectures": self._config["architectures"],
            "preferred_sampling_params": None,
        }
        return web.json_response(said | self.model_info)

    async def _server_info(self, request: web.Request) -> web.Response:
        said = {
            "version": "0.5.23",
            "model_path": str(self.model),
            "weight_version": "default",
            "startup_time": {"tokenizer_e2e": self.starts + self.turns * len(self.headers)},
            "random_seed": self.starts,
            "max_req_input_len": self.context - 6,
            "dtype": "float32",
            "api_key": self.key,
        }
        return web.json_response(said | self.server_info)

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_used_tokens": self.tokens}]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self.running:
            self.aborted.append(rid)
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response(text="Cache flushed.")

    async def _frame(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if not asked["server_args"]["rl_refit"]:
            return web.json_response([{"rl_refit": [self.paused]}])
        frame = base64.b64decode(asked["rid"])
        answer = await asyncio.to_thread(self._refits.answer_frame, frame)
        self.weight_version = self._refits.state()["label"] or self.weight_version
        return web.json_response([{"rl_refit": [base64.b64encode(answer).decode()]}])

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.requests.append(asked)
        if self.fault == "500":
            return web.Response(status=500, text="boom")
        if self.fault in _REFUSED:
            return web.json_response({"error": {"message": _REFUSED[self.fault]}}, status=503)
        if "top_logprobs_num" in asked:
            return self._candidates(asked)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if self.fault == "nonsense":
            await answer.write(b"<html>hello</html>\n\n")
            return answer
        if self.fault == "no event":
            await answer.write(b'data: {"hello": 1}\n\n')
            return answer
        rid, params = asked["rid"], asked["sampling_params"]
        self.running.add(rid)
        try:
            await self._decode(asked, params, rid, answer, request)
        finally:
            self.running.discard(rid)
        return answer

    async def _decode(
        self, asked: Any, params: Any, rid: str, answer: web.StreamResponse, request: web.Request
    ) -> None:
        ends = set(params["stop_token_ids"]) | {self._config.get("eos_token_id")}
        ids: list[int] = []
        sent = 0
        reason: dict[str, Any] | None = None
        while reason is None:
            await asyncio.sleep(self.token_s)
            while self.fault == "hang" and rid not in self.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ids.append((sum(asked["input_ids"]) + len(ids)) % 200 + 10)
            self.tokens += 1
            if rid in self.aborted or self.fault == "abort":
                reason = {"type": "abort", "message": "Aborted"}
            elif ids[-1] in ends and not params["ignore_eos"]:
                reason = {"type": "stop", "matched": ids[-1]}
            elif len(ids) == params["max_new_tokens"]:
                reason = {"type": "length", "length": len(ids)}
            if self.fault == "hang up" and len(ids) == 3:
                request.transport.abort()
                return
            if reason is None and (len(ids) - 1) % params["stream_interval"]:
                continue
            logprob = None if self.fault == "nan" else -1.0
            new = ids[sent:] if self.server_info.get("incremental_streaming_output") else ids
            sent = len(ids)
            logprobs = [[logprob, token, None] for token in new]
            event = {
                "output_ids": new,
                "meta_info": {
                    "id": rid,
                    "finish_reason": reason,
                    "weight_version": self.weight_version,
                    "output_token_logprobs": logprobs[1:] if self.fault == "short" else logprobs,
                },
            }
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")

    def _candidates(self, asked: Any) -> web.Response:
        temperature = 1.0 if self.raw else asked["sampling_params"]["temperature"]
        found = [[-0.5 * place / temperature, 20 + place, None] for place in range(16)]
        return web.json_response({"meta_info": {"output_top_logprobs": [found]}})
