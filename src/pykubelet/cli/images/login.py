"""`pykubelet login` and `logout`: credentials of registries for all pods of a node.

They are in `config.json` in the kubelet's root directory, in the format of `docker login`; the kubelet
reads the file for every pull, so a change needs no restart. Other entries and fields stay. The file is
written atomically with mode 0600, under a lock.

The kubelet reads only the first file of its search path. When a login creates the first one, the entries of
the file that was in use are copied into it.
"""

from __future__ import annotations

import base64
import getpass
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykubelet.cli.client import run_command
from pykubelet.cli.images.registry_check import Login, RegistryError, check_login
from pykubelet.cli.node_access import select_node
from pykubelet.cli.options import NodeSelection
from pykubelet.images.credentials import (
    MAX_BYTES,
    BadCredentials,
    NodeCredentials,
    read_config_json,
    registry_key,
)
from pykubelet.images.image_reference import HUB
from pykubelet.util.files import exclusive_lock, write_atomically
from pykubelet.util.text import quoted

LOGIN, LOGOUT = "pykubelet login", "pykubelet logout"
FILE_NAME = "config.json"
_LOCK_NAME = ".config.json.lock"
_HUB_ENTRY = "https://index.docker.io/v1/"
"""Name of Docker Hub in these files."""
_HUB_NAMES = (HUB, "index.docker.io", "registry-1.docker.io")
_MAX_PASSWORD_BYTES = 64 * 1024


class LoginError(Exception):
    """Raised when credentials cannot be read, checked or stored; one line."""


@dataclass(frozen=True, slots=True)
class LoginOptions:
    """Options of `login`."""

    registry: str
    user: str = ""
    password_stdin: bool = False
    check: bool = True
    ca_file: Path | None = None


def run_login(selection: NodeSelection, options: LoginOptions) -> int:
    """Check and store credentials; return the exit code."""

    def work() -> int:
        node = select_node(selection)
        entry, host = registry_entry(options.registry)
        path = node.root_dir / FILE_NAME
        if not node.root_dir.is_dir():
            raise LoginError(f"there is no directory {node.root_dir}: start the node once")
        load_config(path)
        user, password = _read_credentials(options)
        if options.check:
            check_login(Login(host, user, password), options.ca_file)
        copied = store_entry(path, entry, user, password)
        if copied is not None:
            print(f"Copied the entries of {copied}, which the kubelet does not read any more")
        checked = "" if options.check else "; the credentials were not checked"
        print(f"Logged in to {host}: stored in {path}{checked}")
        return 0

    return run_command(LOGIN, work, LoginError, RegistryError)


def run_logout(selection: NodeSelection, registry: str) -> int:
    """Remove credentials; return the exit code."""

    def work() -> int:
        entry, host = registry_entry(registry)
        path = select_node(selection).root_dir / FILE_NAME
        if not remove_entry(path, entry):
            raise LoginError(f"{path} has no credentials of {host}")
        print(f"Removed the credentials of {host} from {path}")
        return 0

    return run_command(LOGOUT, work, LoginError)


def registry_entry(registry: str) -> tuple[str, str]:
    """Return the name of a registry in the file, and its host. Raises LoginError."""
    key = registry_key(registry)
    if not key or "@" in registry or registry.startswith("http://") or any(c in registry for c in "*?#"):
        raise LoginError(
            f"{quoted(registry.rpartition('@')[2])} is not a registry: give its host, such as ghcr.io"
        )
    host = key.partition("/")[0]
    return (_HUB_ENTRY, HUB) if host in _HUB_NAMES else (key.rstrip("/"), host)


def store_entry(path: Path, entry: str, user: str, password: str) -> Path | None:
    """Store credentials; return the file whose entries were copied, if any. Raises LoginError."""
    try:
        with exclusive_lock(path.with_name(_LOCK_NAME)):
            copied = None
            if (config := load_config(path)) is None:
                copied, config = _config_in_use(path)
            auths = _auths(config)
            for known in _same(auths, entry):
                del auths[known]
            auth = base64.b64encode(f"{user}:{password}".encode()).decode()
            auths[entry] = {"auth": auth}
            _write(path, config)
    except OSError as err:
        raise LoginError(f"cannot write {path}: {err.strerror}") from err
    return copied


def remove_entry(path: Path, entry: str) -> bool:
    """Remove the credentials of a registry; return whether there were any. Raises LoginError."""
    try:
        with exclusive_lock(path.with_name(_LOCK_NAME)):
            config = load_config(path) or {}
            auths = _auths(config)
            found = _same(auths, entry)
            for known in found:
                del auths[known]
            if found and not auths and len(config) == 1:
                path.unlink()
            elif found:
                _write(path, config)
    except OSError as err:
        raise LoginError(f"cannot write {path}: {err.strerror}") from err
    return bool(found)


def load_config(path: Path) -> dict[str, Any] | None:
    """Return the content of a `config.json`, None if it does not exist. Raises LoginError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise BadCredentials(f"it is larger than {MAX_BYTES >> 20} MiB")
        read_config_json(content)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise LoginError("only root may change the node's credentials: run it with sudo") from None
    except OSError as err:
        raise LoginError(f"cannot read {path}: {err.strerror}") from err
    except BadCredentials as err:
        raise LoginError(f"{path} is invalid: {err}; correct or remove it first") from None
    found = json.loads(content)
    return found if isinstance(found, dict) else {}


def _auths(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries, which are created if they are missing."""
    name = next((key for key in config if key.lower() == "auths"), "auths")
    if not isinstance(config.get(name), dict):
        config[name] = {}
    auths: dict[str, Any] = config[name]
    return auths


def _same(auths: dict[str, Any], entry: str) -> list[str]:
    return [known for known in auths if registry_key(known) == registry_key(entry)]


def _config_in_use(path: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the first other file of the search path with entries, and a copy of its entries."""
    home = Path.home()
    for other, parse in NodeCredentials(path.parent, Path("/"), home).files():
        try:
            content = other.read_bytes()[:MAX_BYTES]
            parse(content)
            document = json.loads(content)
        except (OSError, ValueError):
            continue
        entries = _auths(document) if parse is read_config_json else document
        return (other if entries else None), {"auths": dict(entries)}
    return None, {}


def _write(path: Path, config: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(config, indent=2).encode() + b"\n", 0o600, sync_directory=True)


def _read_credentials(options: LoginOptions) -> tuple[str, str]:
    """Return user and password, from the terminal or standard input. Raises LoginError."""
    user = options.user
    if options.password_stdin:
        if not user:
            raise LoginError("--password-stdin needs the user: give it with -u")
        data = sys.stdin.buffer.read(_MAX_PASSWORD_BYTES + 1)
        if len(data) > _MAX_PASSWORD_BYTES:
            raise LoginError(f"the password has more than {_MAX_PASSWORD_BYTES >> 10} KiB")
        try:
            password = data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise LoginError("the password is not UTF-8") from None
    elif not sys.stdin.isatty():
        raise LoginError("there is no terminal to ask for the password: use --password-stdin")
    else:
        try:
            user = user or input("Username: ").strip()
            password = getpass.getpass("Password: ")
        except EOFError:
            raise LoginError("no password was given") from None
    if not user or ":" in user or not user.isprintable():
        raise LoginError("the user name is empty, or has a colon or a control character")
    if not password or "\n" in password or "\0" in password:
        raise LoginError("the password is empty, or has more than one line")
    return user, password
