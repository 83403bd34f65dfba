"""A Hugging Face hub id -> a local directory, pinned to a commit.

Knows which files of a repository are worth fetching and what can go wrong on the way. The transfer (resuming, cache,
token from HF_TOKEN or the login, HF_ENDPOINT, HF_HUB_OFFLINE) is huggingface_hub's. Knows nothing of what files mean.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from paceline.errors import CheckpointError, HubUnreachableError

# Told bytes on disk so far, and bytes in all as far as known. Must not raise: it is called under a lock of the bars.
Progress = Callable[[int, int], None]

_TEXT_SUFFIXES = (".json", ".jinja")
# Of several GGUF files: Q8_0 first, since an int8 engine loses least against it per byte downloaded.
_GGUF_PREFERENCE = ("q8_0", "bf16", "f16", "q6_k", "q5_k_m", "q4_k_m")


def download(
    repository: str, revision: str | None, progress: Progress | None, offline: bool = False
) -> tuple[Path, str]:
    """Fetch `repository` into the hub cache, or find it there; return its directory and `repository@commit`.

    Weights are safetensors, or one GGUF file where the repository has no other; pickles and code are never fetched. An
    interrupted download continues. Without a network, or with HF_HUB_OFFLINE=1, a cached copy is used. Without
    `progress`, huggingface_hub draws its own bars on stderr. With `offline` the hub is not asked at all. Raises
    CheckpointError; HubUnreachableError where only a connection is missing.
    """
    if offline:
        return _find_in_cache(repository, revision, None)
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise _refusal(repository, revision, error) from error
    except Exception as error:  # offline mode, no network, a failing server: each transport has its own classes
        return _find_in_cache(repository, revision, error)
    files = select_files(repository, [file.rfilename for file in info.siblings or ()])
    bars = {} if progress is None else {"tqdm_class": _reporting_to(progress)}
    try:
        # By name, not by commit, so that the cache remembers which commit the name meant when next offline.
        directory = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=files, **bars)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise _refusal(repository, revision, error) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            hint = f"Free some space, or set HF_HOME to another disk; the cache is `{_cache_directory()}`."
            raise CheckpointError(f"The disk is full while downloading `{repository}`", hint) from error
        raise CheckpointError(
            f"Downloading `{repository}` stopped ({_named(error)})", "Run it again: it continues where it stopped."
        ) from error
    return Path(directory), f"{repository}@{Path(directory).name}"


def select_files(repository: str, names: list[str]) -> list[str]:
    """Which files of a repository to fetch. Raises CheckpointError when it holds no weights we can use."""
    names = [name for name in names if "/" not in name]  # folders hold other formats of the same weights
    texts = [name for name in names if name.endswith(_TEXT_SUFFIXES)]
    safetensors = [name for name in names if name.endswith(".safetensors")]
    published = [name for name in safetensors if name.startswith("model")]  # beside Mistral's consolidated.safetensors
    if safetensors:
        return sorted(texts + (published or safetensors))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs
    for quantization in _GGUF_PREFERENCE:
        for name in ggufs:
            if name.lower().removesuffix(".gguf").endswith(quantization):
                return [name]
    if ggufs:
        raise CheckpointError(
            f"`{repository}` holds {len(ggufs)} GGUF files and none of the usual kinds: {', '.join(ggufs[:6])}",
            f"Download one (`hf download {repository} {ggufs[0]}`) and name it by its path.",
        )
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    raise CheckpointError(
        f"`{repository}` holds {'only pickled weights; loading them could run any code' if pickled else 'no weights'}",
        "Use a repository with safetensors or GGUF files.",
    )


def _find_in_cache(repository: str, revision: str | None, reason: Exception | None) -> tuple[Path, str]:
    try:
        # Completeness is judged when the directory is opened; config.json is only what every download has.
        directory = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=["config.json"], local_files_only=True
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        at = "" if revision is None else f" at revision {revision!r}"
        raise HubUnreachableError(
            f"`{repository}`{at} is not in the cache `{_cache_directory()}`, and the hub "
            + ("was not asked" if reason is None else f"cannot be reached ({_named(reason)})"),
            "Connect to the network (or unset HF_HUB_OFFLINE), or name a directory, a .gguf file or package:NAME.",
        ) from reason
    return Path(directory), f"{repository}@{Path(directory).name}"


def _refusal(repository: str, revision: str | None, error: Exception) -> CheckpointError:
    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError
        return CheckpointError(
            f"`{repository}` is gated: its licence must be accepted first",
            f"Accept it at https://huggingface.co/{repository}, then set HF_TOKEN (or run `hf auth login`).",
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"`revision`: `{repository}` has no branch, tag or commit {revision!r}",
            f"See https://huggingface.co/{repository}/commits/main.",
        )
    if isinstance(error, HFValidationError):
        return CheckpointError(f"`{repository}` is no valid hub id ({error})", "Hub ids look like OWNER/NAME.")
    return CheckpointError(
        f"`{repository}` is not on the hub, or is private, and no such local path exists",
        "Check the spelling; for a private repository set HF_TOKEN (or run `hf auth login`).",
    )


def _reporting_to(progress: Progress) -> type[tqdm]:
    class Bar(tqdm):
        """Draws nothing; tells `progress` about bytes. Bars that count files stay silent."""

        def __init__(self, *args, **kwargs):
            kwargs.update(file=io.StringIO(), disable=False)
            super().__init__(*args, **kwargs)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            # Of the byte bars, the one that counts what is on disk includes what an earlier run had fetched.
            if self.unit == "B" and self.total and "Download" not in (self.desc or ""):
                progress(int(self.n), int(self.total))

    return Bar


def _cache_directory() -> str:
    return huggingface_hub.constants.HF_HUB_CACHE


def _named(error: Exception) -> str:
    first_line = (str(error).strip() or "no details").splitlines()[0]
    return f"{type(error).__name__}: {first_line}"
