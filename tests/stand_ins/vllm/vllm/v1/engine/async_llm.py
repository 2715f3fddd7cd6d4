"""The engine: a step each millisecond, a letter in each sequence."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

REFUSED, DEADLY = 8, 9
"""Tokens of prompts with which it refuses the request, and with which it dies."""
IMAGE = 7
"""The token of a part of an image: two for each."""


class Renderer:
    """Makes prompts of text and images."""

    def __init__(self, most_images):
        info = SimpleNamespace(allowed_mm_limits={"image": most_images})
        self.mm_processor = SimpleNamespace(info=info) if most_images else None

    async def render_cmpl_async(self, prompts):
        (prompt,) = prompts
        images = prompt["multi_modal_data"]["image"]
        tokens = [IMAGE] * (2 * len(images)) + prompt["prompt_token_ids"]
        places = {"image": [SimpleNamespace(length=2) for _ in images]}
        made = {"type": "multimodal", "prompt_token_ids": tokens, "mm_placeholders": places}
        return [{**made, **{key: prompt[key] for key in ("cache_salt",) if key in prompt}}]


class Outputs:
    """Where what comes of a request waits to be taken."""

    def __init__(self, params, lora):
        self.letters = "abcdefghijklmnopqrstuvwxyz" if lora is None else lora.lora_name * 26
        self.params = params
        self.tokens = 0
        self.waiting = None
        self.deadly = False

    def put(self, finish_reason):
        number = self.tokens % 26
        self.tokens += 1
        told = {number: SimpleNamespace(logprob=-0.5, rank=1, decoded_token=self.letters[number])}
        told[99] = SimpleNamespace(logprob=-1.5, rank=2, decoded_token="?")
        ended = finish_reason == "abort"
        self.waiting = SimpleNamespace(
            finished=finish_reason is not None,
            num_cached_tokens=3,
            prompt_token_ids=[0, number],
            prompt_logprobs=None if getattr(self.params, "prompt_logprobs", None) is None else [None, told],
            outputs=[
                SimpleNamespace(
                    index=index, token_ids=[] if ended else [number], text="" if ended else self.letters[number],
                    logprobs=None if ended or self.params.logprobs is None else [told], finish_reason=finish_reason,
                )
                for index in range(self.params.n)
            ],
        )  # fmt: skip

    def get_nowait(self):
        output, self.waiting = self.waiting, None
        if isinstance(output, Exception):
            raise output
        return output


class AsyncLLM:
    """Its engine is no process, but a task."""

    def __init__(self, args, loggers):
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=args.num_gpu_blocks_override, block_size=16),
            model_config=SimpleNamespace(max_model_len=args.max_model_len, max_logprobs=20),
            scheduler_config=SimpleNamespace(max_num_seqs=args.max_num_seqs, policy=args.scheduling_policy),
        )
        self.renderer = Renderer(args.most_images)
        self.errored = False
        self.adapters = []
        self.prompts = args.prompts
        self._tasks = args.tasks
        self._mortal = args.mortal
        self._most_tokens = args.most_tokens
        self._loggers = [logger(self.vllm_config) for logger in loggers]
        self._running = {}
        self.output_handler = None
        self.asleep = 0
        """The level of its sleep."""
        self._args = args
        self._held = b"x" * args.host_bytes
        self._take_memory(args.gpu_bytes)

    @classmethod
    def from_engine_args(cls, args, stat_loggers):
        return cls(args, stat_loggers)

    async def get_supported_tasks(self):
        return self._tasks

    def get_tokenizer(self):
        return SimpleNamespace(encode=lambda text, add_special_tokens: [1] * add_special_tokens + list(text.encode()))

    async def add_lora(self, adapter):
        if adapter.lora_path == "nowhere":
            raise ValueError("no adapter there")
        self.adapters.append(adapter)

    async def remove_lora(self, number):
        self.adapters = [adapter for adapter in self.adapters if adapter.lora_int_id != number]

    async def sleep(self, level=1, mode="abort"):
        assert self._args.enable_sleep_mode and not self.asleep and not self._running
        self.asleep = level
        self._take_memory(self._args.gpu_bytes // 20)

    async def wake_up(self, tags=None):
        assert self.asleep
        if not self._args.wakes:
            raise RuntimeError("CUDA out of memory")
        self.asleep = 0
        self._take_memory(self._args.gpu_bytes)

    def _take_memory(self, size):
        if size and "STAND_IN_GPU_USE" in os.environ:
            Path(os.environ["STAND_IN_GPU_USE"], str(os.getpid())).write_text(str(size))

    async def add_request(self, id, prompt, params, lora_request=None, priority=0):
        if self.errored:
            raise EngineDeadError("it is dead")
        if self._mortal and REFUSED in prompt["prompt_token_ids"]:
            raise VLLMClientError("a token that is none")
        assert not self.asleep
        self.prompts.append(prompt)
        outputs = self._running[id] = Outputs(params, lora_request)
        outputs.deadly = self._mortal and DEADLY in prompt["prompt_token_ids"]
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._steps())
        return outputs

    async def generate(self, prompt, params, id):
        outputs = await self.add_request(id, prompt, params)
        while True:
            await asyncio.sleep(0.001)
            if (output := outputs.get_nowait()) is not None:
                yield output
                if output.finished:
                    return

    async def abort(self, ids):
        for id in ids:
            if (outputs := self._running.pop(id, None)) is not None:
                outputs.put("abort")

    def shutdown(self):
        if self.output_handler is not None:
            self.output_handler.cancel()

    async def _steps(self):
        while True:
            await asyncio.sleep(0.001)
            if any(outputs.deadly for outputs in self._running.values()):
                self.errored = True
                for outputs in self._running.values():
                    outputs.waiting = EngineDeadError("it has died")
                return
            if self._running:
                self._step()

    def _step(self):
        for id, outputs in list(self._running.items()):
            # As the real one does, it adds to what nobody has taken; here everything is taken in time.
            last = outputs.tokens + 1 in (outputs.params.max_tokens, self._most_tokens)
            outputs.put("length" if last else None)
            if last:
                del self._running[id]
        running = len(self._running)
        blocks = self.vllm_config.cache_config.num_gpu_blocks
        scheduler = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=0, kv_cache_usage=running / blocks, spec_decoding_stats=None,
            prefix_cache_stats=SimpleNamespace(queries=2, hits=1),
        )  # fmt: skip
        for logger in self._loggers:
            logger.record(scheduler_stats=scheduler, iteration_stats=SimpleNamespace(num_preempted_reqs=0))
