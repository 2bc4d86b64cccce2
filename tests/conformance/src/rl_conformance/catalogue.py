"""The catalogue: every clause of the contract, in order, with what the suite checks of it now.

A run gives every entry a status; a run that leaves one out is incomplete. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, get_args

__all__ = [
    "CLAUSES",
    "KINDS",
    "LARGEST_CONSTANT",
    "LEAST_RELEASED",
    "LOOSEST",
    "Clause",
    "Kind",
    "Level",
]

Kind = Literal["data", "discovery", "generation", "policy", "refit", "agreement", "security"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Level = Literal["must", "if_declared"]

#: Loosest ``(mean, max)`` absolute log-prob difference that a manifest may declare, by dtype; every
#: other dtype of fewer than 32 bits as bfloat16.
LOOSEST: dict[str, tuple[float, float]] = {
    "float64": (1e-4, 1e-3),
    "float32": (1e-4, 1e-3),
    "bfloat16": (3e-2, 2e-1),
}
#: The most that a manifest may set as ``refit_constant_bytes``, the least as ``released_fraction``.
LARGEST_CONSTANT, LEAST_RELEASED = 256 << 20, 0.5
_DECLARED = "|log-prob difference|: mean and maximum as the manifest declares for the dtype"
_SEEDED = "draws that differ: none in float32, else 8 times the mean tolerance of them"

_KIND_OF_LETTER: dict[str, Kind] = {
    "B": "data",
    "D": "discovery",
    "G": "generation",
    "P": "policy",
    "R": "refit",
    "A": "agreement",
    "S": "security",
}

#: By clause, the methods and fields of a backend that decide it. What is in brackets is the name in
#: ``rl_backends``, for backends that are built on it.
_LOOK = {
    "D1": "the imports of the module that holds the manifest",
    "D2": "the manifest: capabilities, tolerances, factories, configs, engine",
    "D3": "the manifest's capabilities, and the call that each of them is about",
    "D4": "the TypedDict under the manifest's configs; the constructor, before it loads the model",
    "G1": "generate: the checks of input_ids, input_lengths and attention_mask (PromptBatch)",
    "G2": "generate: output_ids, unpadded_sequence_lengths, generation_lengths "
    "(Completion.token_ids)",
    "G3": "generate: logprobs (Completion.logprobs)",
    "G4": "generate: logprobs under logprobs_mode (Completion.logprobs, SamplingParams)",
    "G5": "generate: truncated (Completion.truncated)",
    "G6": "generate: max_new_tokens and the context length (PromptBatch.budgets, "
    "ModelFacts.max_model_len)",
    "G7": "generate: where a row ends (SamplingParams.stop_token_ids, PromptBatch.stop_strings)",
    "G8": "generate(greedy=True): state that one row or call leaves for another, such as a cache",
    "G9": "generate: the random generator of each row (PromptBatch.seeds)",
    "G10": "generate: temperature, top_k, top_p, repetition_penalty (SamplingParams)",
    "G11": "the model's forward pass: attention mask, positions, dtype (Completion.logprobs)",
    "G12": "generate: batches of unusual shapes, extra columns (complete)",
    "G13": "prepare_for_generation, finish_generation (on_wake, on_sleep)",
    "G14": "the state that generate checks first; shutdown (on_shutdown)",
    "G15": "generate: weights_version, weights_origin",
    "G16": "generate_async: what it yields and when (complete, row_engine)",
    "G17": "generate(num_generations=n)",
    "G18": "generate from several threads (row_engine, call_deadline_s)",
    "P1": "get_logprobs: the shift by one token, temperature, dtype of the softmax",
    "P2": "get_logprobs(micro_batch_size=...): padding, packing, the order of the rows",
    "P3": "get_reference_policy_logprobs: the copy of the first weights",
    "P4": "get_topk_logits",
    "P5": "train(gbs=..., mbs=...): normalisation of the loss, gradient, optimizer step",
    "P6": "train(eval_mode=True)",
    "P7": "train: checks of loss and gradient before the step; sample_mask and token_mask",
    "P8": "train: the sign of the gradient, the learning rate",
    "P9": "save_checkpoint and the key resume_from: weights, optimizer, scheduler, random state",
    "P10": "prepare_for_training, finish_training, offload_before_refit, offload_after_refit",
    "P11": "the policy's generate",
    "P12": "calibrate_qkv_fp8_scales",
    "P13": "score",
    "P14": "the layout of the weights over ranks, and the collective calls of each method",
    "R1": "weight_source of the policy, weight_sink of the engine: which tensors, which names",
    "R2": "prepare_refit_info; specs of WeightSource and WeightSink: names, shapes, dtypes",
    "R3": "weight_source, weight_sink: tensors that another process reads or writes",
    "R4": "the group that the engine joins for transport='collective'",
    "R5": "prepare_weights_for_ipc, get_weights_ipc_handles, update_weights",
    "R6": "what weight_source and weight_sink keep after a refit: tensors, files, threads",
    "R7": "WeightSink.write, targets: tensors of unusual shapes and strides",
    "R8": "WeightSink.write and finish when an error interrupts them",
    "R9": "tensors that change while they are sent; copies that the sink keeps",
    "R10": "weights_version, and the caches that WeightSink.finish must empty",
    "R11": "WeightSink under isolation='staged': what it changes before finish",
    "R12": "copies of tensors that weight_source or weight_sink makes",
    "R13": "state that two engines or two trainers of one process share",
    "R14": "WeightSink.scale_kv",
    "R15": "WeightSink.read, and whether WeightSink.write reaches the weights in use",
    "R16": "weight_source on each rank: pieces, their boxes and tensors; refit_ranks; confirm",
    "R17": "WeightSink of an engine that serves adapters: where A and B of each layer go, which "
    "adapter a row gets, fail",
    "A1": "logprobs of generate, get_logprobs",
    "A2": "generate with long outputs: decoding with a cache against a forward pass",
    "A3": "logprobs of generate and get_logprobs before and after training and a refit",
    "S1": "what is unpickled or parsed from another process",
    "S3": "trust_remote_code at every call that loads a part of the checkpoint",
}


@dataclass(frozen=True, slots=True)
class Clause:
    """One numbered clause of the contract.

    Attributes:
        id: Its number, such as ``"G3"``.
        title: What it demands, in a few words.
        capability: The capability that binds a backend to it, or None if it binds every backend.
        device: ``"any"``, or ``"cuda"`` if nothing of it can be seen on a CPU.
        tolerance: What a measured value may come to, "" where nothing is measured.
        scope: Which part the suite checks now, "" if all of it.
        core: Whether core alone keeps it, so that a run against a backend leaves it out.
    """

    id: str
    title: str
    capability: str | None = None
    device: Literal["any", "cuda"] = "any"
    tolerance: str = ""
    scope: str = ""
    core: bool = False

    def as_dict(self) -> dict[str, str | bool | None]:
        """For JSON."""
        return {**asdict(self), "kind": self.kind, "level": self.level}

    @property
    def look(self) -> str:
        """Where an author looks first if it is broken: methods and fields of the backend."""
        return _LOOK.get(self.id, "")

    @property
    def level(self) -> Level:
        """Whom it binds: every backend, or those that declare its capability."""
        return "must" if self.capability is None else "if_declared"

    @property
    def kind(self) -> Kind:
        """The chapter it belongs to."""
        return _KIND_OF_LETTER[self.id[0]]


_ENTRIES = (
    Clause("B1", "a batch is a mapping of batch-first tensors and lists of one size", core=True),
    Clause("B2", "from_batches pads, concatenates and names what is missing", core=True),
    Clause(
        "B3", "slicing, reordering and repeating keep rows together and truncate nothing", core=True
    ),
    Clause("B4", "sharding loses no row; microbatches and packed bins keep their bound", core=True),
    Clause("B5", "microbatch iterators yield every row, narrowed to its microbatch", core=True),
    Clause("B6", "a batch survives pickling, Ray and torch.save bit for bit", core=True),
    Clause("B7", "verify_right_padding names the row and the positions", core=True),
    Clause(
        "D1",
        "listed without its engine, and without importing torch, ray or the engine",
        scope="the engine is hidden from the import system, not uninstalled",
    ),
    Clause("D2", "the manifest is complete"),
    Clause("D3", "what it declares is what it does"),
    Clause(
        "D4",
        "a wrong configuration key or a missing engine is named before a model is loaded",
        scope="a missing engine is simulated by looking for a distribution that does not exist",
    ),
    Clause(
        "D5",
        "a worker's exception arrives as a WorkerError with its traceback",
        scope="driver and worker share one environment",
        core=True,
    ),
    Clause("G1", "prompts are right-padded; anything else is refused, naming the row"),
    Clause("G2", "the output is the prompt, the generated tokens, then padding"),
    Clause("G3", "log-probs are 0 on prompt and padding, finite and <= 0 elsewhere"),
    Clause("G4", "log-probs are raw or processed, as configured", tolerance=_DECLARED),
    Clause("G5", "truncated means stopped by length"),
    Clause("G6", "max_new_tokens and the context length are never exceeded"),
    Clause("G7", "stop tokens and stop strings end their own row and are kept"),
    Clause(
        "G8",
        "greedy output is deterministic and independent of the rest of the batch",
        tolerance=_DECLARED,
    ),
    Clause("G9", "a seed makes sampling reproducible, and only a seed does", tolerance=_SEEDED),
    Clause(
        "G10",
        "the sampled distribution is the declared one",
        tolerance="chi-square at an error rate of 1e-4",
    ),
    Clause(
        "G11",
        "greedy log-probs agree with a float32 reference",
        tolerance=f"{_DECLARED}; the token's logit within twice the maximum of the largest",
    ),
    Clause("G12", "one row, many rows, ragged rows, extra keys and no rows at all"),
    Clause(
        "G13",
        "waking and sleeping are idempotent; sleeping releases memory",
        tolerance=f"{_DECLARED}; memory kept: at most 1 - released_fraction of the manifest",
        scope="the amount that is released is measured on CUDA only",
    ),
    Clause("G14", "a call in the wrong state raises; shutdown leaves nothing behind"),
    Clause("G15", "every row carries the version of the weights that made it"),
    Clause(
        "G16", "rows are yielded as they finish", capability="async_generation", tolerance=_DECLARED
    ),
    Clause(
        "G17",
        "n samples per prompt equal repeat_interleave(n)",
        capability="multi_sample",
        tolerance=_SEEDED,
    ),
    Clause(
        "G18",
        "many calls at once keep to their rows, one version and their turn",
        tolerance=_SEEDED,
    ),
    Clause(
        "P1",
        "log-probs score token t given those before it, at the policy's temperature",
        tolerance=_DECLARED,
    ),
    Clause(
        "P2", "log-probs do not depend on how rows are split, padded or packed", tolerance=_DECLARED
    ),
    Clause(
        "P3", "the reference policy never moves and never harms the policy", tolerance=_DECLARED
    ),
    Clause(
        "P4",
        "top-k logits are sorted and belong to the next token",
        capability="topk_logits",
        tolerance=_DECLARED,
    ),
    Clause(
        "P5",
        "one optimizer step per global batch, whatever the microbatches",
        tolerance=f"{_DECLARED}; loss: the mean; gradient norm: the mean of it, 1e-4 at least; in "
        "several steps of float32: loss: the maximum; norm: 1e-3 of it; a tensor's way: 3e-2 of it",
        scope="one and two data-parallel ranks, on one node; options of the optimizer in float32",
    ),
    Clause(
        "P6", "eval_mode changes nothing", tolerance="loss: the mean that the manifest declares"
    ),
    Clause(
        "P7",
        "what is not finite or masked never reaches the weights",
        tolerance=f"{_DECLARED}; loss, gradient norm: a tenth of the mean of them, 1e-5 at least",
    ),
    Clause("P8", "training moves log-probs in the direction of the loss"),
    Clause(
        "P9",
        "a checkpoint resumes bit for bit, and an interrupted one never loads",
        tolerance=_DECLARED,
        scope="a save is interrupted by an exception at each of its file operations",
    ),
    Clause(
        "P10",
        "the lifecycle calls are idempotent and leave results unchanged",
        tolerance="memory kept: at most 1 - released_fraction of the manifest",
        scope="the amount that is released is measured on CUDA only",
    ),
    Clause(
        "P11",
        "policy.generate keeps G1 to G12",
        capability="policy_generate",
        tolerance="as G1 to G12",
        scope="the checks of G1 to G12 that --fast selects and that belong to no capability",
    ),
    Clause(
        "P12",
        "FP8 key/value scales come from observed magnitudes",
        capability="fp8_kv_scales",
        tolerance="1e-3 of a scale between two; 1e-2 of the oracle's, 6e-2 below 32 bits",
    ),
    Clause("P13", "score returns one float per row", capability="score", tolerance=_DECLARED),
    Clause(
        "P14",
        "a copy of the model on several ranks gives what it gives on one",
        capability="sharded",
        tolerance=f"{_DECLARED}; steps in float32, as in P5; drawn tokens in float32: none differs",
        scope="a few of the layouts that the plugin names for the suite, or all with "
        "--layouts all; on one node, with no more ranks than there are GPUs",
    ),
    Clause("R1", "after a refit the engine equals the policy, bit for bit", tolerance=_DECLARED),
    Clause(
        "R2",
        "the manifest is compared, by name, before any weight is touched",
        tolerance=_DECLARED,
    ),
    Clause("R3", "the ipc transport is exact between processes", tolerance=_DECLARED),
    Clause(
        "R4",
        "the collective transport is exact",
        capability="collective",
        tolerance=_DECLARED,
        scope="gloo between processes of one host; one and two engines, one sending trainer of one "
        "and of two",
    ),
    Clause("R5", "the older methods are exact, all or none", tolerance=_DECLARED),
    Clause(
        "R6",
        "refit after refit stays exact and nothing grows",
        tolerance="2 MiB of memory over 50 refits",
    ),
    Clause(
        "R7",
        "large, tied, strided, 0-d, empty and mixed tensors arrive exactly",
        tolerance=_DECLARED,
    ),
    Clause(
        "R8",
        "a peer killed in any phase is an error before the deadline, and a refit recovers",
        tolerance=_DECLARED,
        scope="killed before the first tensor, between two and before the commit, over ipc; an "
        "engine also over a group",
    ),
    Clause(
        "R9",
        "damaged, lost, repeated or reordered messages never commit",
        tolerance=_DECLARED,
        scope="messages are disturbed before they are sent; bytes are damaged where the sender has "
        "them",
    ),
    Clause(
        "R10", "the version moves on commit only, and caches do not outlive it", tolerance=_DECLARED
    ),
    Clause(
        "R11",
        "a staged refit that fails leaves the old version serving",
        capability="staged",
        tolerance=_DECLARED,
    ),
    Clause(
        "R12",
        "extra memory during a refit stays under its bound",
        tolerance="two buckets, and refit_constant_bytes of the manifest",
        scope="a model larger than the bound; the peak of each process that was there before, and "
        "of device memory where the trainer is; a direct refit once the tensors are in place",
    ),
    Clause(
        "R13",
        "of several receivers all advance or none",
        scope="two receivers in one process; the one that fails is a double that holds tensors",
    ),
    Clause(
        "R14",
        "FP8 scales travel with the weights",
        capability="kv_scales",
        tolerance=_DECLARED,
        scope="that they are applied shows in log-probs; the trainer is the suite's own",
    ),
    Clause("R15", 'verify="installed" catches a loader that does not load', tolerance=_DECLARED),
    Clause(
        "R16",
        "several ranks send what each has, once, and commit together",
        capability="sharded",
        tolerance=f"{_DECLARED}; memory: two buckets of each rank, and refit_constant_bytes of the "
        "manifest",
        scope="layouts as in P14; ranks that stop or die, twenty refits in a row and memory in the "
        "first of them alone; the engines are the suite's own",
    ),
    Clause(
        "R17",
        "a refit sends only adapters, and the old ones serve until it commits",
        capability="adapters",
        tolerance=_DECLARED,
        scope="adapters of all linear layers but the output; the trainer is the suite's own",
    ),
    Clause("A1", "log-prob consistency is measured, and never over an empty mask"),
    Clause(
        "A2",
        "the model diagnostics are library calls and commands",
        tolerance="mean exp(|log-prob difference|) below 1.05",
    ),
    Clause(
        "A3",
        "policy and generation agree, before and after training",
        tolerance="mean exp(|log-prob difference|) below 1.001 in float32, 1.05 in bfloat16",
    ),
    Clause("S1", "malformed messages are refused; nothing is unpickled"),
    Clause("S2", "sockets and shared memory are this user's alone, and are removed"),
    Clause("S3", "remote code runs only with trust_remote_code=True"),
)

#: All clauses by id, in the order of the contract.
CLAUSES: dict[str, Clause] = {entry.id: entry for entry in _ENTRIES}
