"""blocktrain push: sends a trained model to a repository on the Hugging Face Hub, in one commit, with a model card. The
access token comes from the environment or from a login, never from the command line.
Next: model_card.py beside this file, what people read there; hf.py, which writes the other files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import counted, quantity, say, show_line, show_table
from blocktrain.errors import CheckpointError, ConfigError, HubError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from blocktrain.io.checkpoint import RunDirectory

WEIGHTS = "model*.safetensors*"  # of an earlier push; those that this push does not replace are removed
NEEDS_LOGIN = "set HF_TOKEN to an access token with write permission, or run: hf auth login"
REFUSED = (401, 403)
UNKNOWN = 404


def push(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of train, reference or export.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub: OWNER/NAME. Created if missing.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public.")] = False,
    licence: Annotated[
        str | None, typer.Option("--license", metavar="ID", help="Licence of the model, such as cc-by-4.0.")
    ] = None,
    message: Annotated[str, typer.Option(metavar="TEXT", help="Message of the commit.")] = "Push a BlockTrain model",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be sent. No server is contacted.")
    ] = False,
) -> None:
    """Send a trained model to a Hugging Face repository.

    The model is sent as a folder that transformers loads, with a card that states how it was trained, in one commit. A
    new repository is private unless --public is given; an existing one stays as it is. The access token is read from
    HF_TOKEN or from hf auth login."""
    _require_name(repo)
    run = _opened(model)
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as folder:
        if not dry_run:
            _library()  # before a large model is converted
        _write(run, Path(folder), repo, licence)
        files = sorted(path for path in Path(folder).iterdir() if path.is_file())
        total = quantity(sum(path.stat().st_size for path in files), "B")
        if dry_run:
            show_table(["file", "bytes"], [[path.name, f"{path.stat().st_size:,}"] for path in files])
            kind = "public" if public else "private"
            say(f"{counted(len(files), 'file')}, {total}, would go to {repo} ({kind} if it is new); nothing was sent")
            return
        url = _send(files, repo, public, message)
    show_line(f"{url} holds {model}: {counted(len(files), 'file')}, {total}")
    say(f'load it: import blocktrain.hf; AutoModelForCausalLM.from_pretrained("{repo}")')


def _require_name(repo: str) -> None:
    owner, slash, name = repo.partition("/")
    if not (owner and slash and name) or "/" in name:
        raise ConfigError(f'"{repo}" is not the name of a repository: give OWNER/NAME, such as alice/speeches')


def _opened(model: Path) -> RunDirectory:
    from blocktrain.cli.shared.scoring import open_trained

    if (model / "config.json").is_file():
        raise CheckpointError(
            f"{model} is a folder for transformers, without the run's figures: give the directory of the run, or of "
            f"blocktrain export INVITE DIR; push makes that folder itself"
        )
    return open_trained(model)


def _write(run: RunDirectory, folder: Path, repo: str, licence: str | None) -> None:
    """Everything that the repository gets."""
    from blocktrain.cli.commands.serving.model_card import CARD_FILE, model_card

    try:
        from transformers.utils import logging

        from blocktrain.hf import write_folder
    except ImportError as error:
        raise _missing(error) from None
    logging.disable_progress_bar()
    write_folder(run, folder)
    (folder / CARD_FILE).write_text(model_card(run, repo, licence), encoding="utf-8")


def _library() -> HfApi:
    """The Hub's client with the user's access token."""
    try:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise _missing(error) from None
    token = get_token()
    if not token:
        raise ConfigError(f"no access token for {constants.ENDPOINT} was found: {NEEDS_LOGIN}")
    disable_progress_bars()
    return HfApi(endpoint=constants.ENDPOINT, token=token)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"push needs a package that is not installed ({error}): pip install 'blocktrain[hf]'")


def _send(files: list[Path], repo: str, public: bool, message: str) -> str:
    """One commit: readers see the old model or the new one, never parts of both."""
    from fnmatch import fnmatch

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = _library()
    with _explained(repo, api.endpoint):
        url = api.create_repo(repo, private=not public, exist_ok=True)
        names = {path.name for path in files}
        old = [x for x in api.list_repo_files(repo) if fnmatch(x, WEIGHTS) and x not in names]
        additions = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=path) for path in files]
        operations = [*(CommitOperationDelete(path_in_repo=name) for name in old), *additions]
        api.create_commit(repo, operations, commit_message=message)
    return str(url)


@contextmanager
def _explained(repo: str, endpoint: str) -> Iterator[None]:
    """The library's exceptions as ours. The commit comes last, so there is nothing to undo."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        yield
    except HfHubHTTPError as error:
        status, said = error.response.status_code, error.server_message or "no reason given"
        if status in REFUSED:
            raise HubError(
                f"{endpoint} refuses to write {repo} ({status}: {said}): check the owner's name; {NEEDS_LOGIN}"
            ) from None
        if status == UNKNOWN:
            raise HubError(f"{endpoint} knows no {repo} that you may write ({said}): check the name") from None
        raise HubError(f"{endpoint} did not take the model ({status}: {said}): run the same command again") from None
    except HFValidationError as error:
        raise ConfigError(f'"{repo}" is not the name of a repository ({error}): give OWNER/NAME') from None
    except ValueError as error:
        said = " ".join(str(error).split())
        raise HubError(f"{endpoint} refuses the model or its card ({said[:200]}): give another --license") from None
    except (HTTPError, OSError, RuntimeError) as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise HubError(
            f"{endpoint} cannot be reached or broke off ({reason[:200]}): check the connection and HF_ENDPOINT, and "
            f"run the same command again"
        ) from None
