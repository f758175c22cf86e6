"""The command `kvstore`: finds the verb, imports only it, turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

import kvstore
from kvstore.cli.output import exit_code, sentence
from kvstore.core.errors import KVStoreError

# verb: (where its click command is, what `kvstore --help` says)
VERBS = {
    "serve": ("kvstore.cli.serve:command", "Run the daemon."),
    "check": ("kvstore.cli.check:command", "Validate a configuration and print the whole of it."),
    "doctor": ("kvstore.cli.doctor:command", "Look at this machine for what would hurt."),
    "status": ("kvstore.cli.status:command", "Show the daemon's state, tiers and sessions."),
    "top": ("kvstore.cli.top:command", "Watch the daemon live."),
    "spaces": ("kvstore.cli.spaces:command", "List spaces with their blocks and bytes."),
    "demo": ("kvstore.cli.demo:command", "Replay a shipped trace, with a kill in the middle."),
    "replay": ("kvstore.cli.replay:command", "Replay a prefix trace with real, verified bytes."),
    "simulate": ("kvstore.cli.simulate:command", "Try policies and tier sizes on a trace."),
    "tune": ("kvstore.cli.tune:command", "Recommend tier sizes and a policy for a trace."),
    "trace": ("kvstore.cli.trace:command", "Inspect, convert and make prefix traces."),
    "explain": ("kvstore.cli.explain:command", "Show why a request was served as it was."),
    "estimate": ("kvstore.cli.estimate:command", "KV bytes and roofline of a model."),
    "policy": ("kvstore.cli.policy:command", "Show or set which blocks leave first."),
    "quota": ("kvstore.cli.quota:command", "Show or set what a tenant may and is sure to hold."),
    "pin": ("kvstore.cli.pin:command", "Keep a prefix for a time."),
    "unpin": ("kvstore.cli.pin:unpin_command", "Let a pinned prefix go."),
    "clear": ("kvstore.cli.clear:command", "Drop blocks of a space, a tenant or all."),
    "flush": ("kvstore.cli.flush:command", "Write blocks of the host tier to disk now."),
    "verify": ("kvstore.cli.verify:command", "Check stored bytes against their checksums."),
    "drain": ("kvstore.cli.drain:command", "Let the daemon finish its work and leave."),
    "fsck": ("kvstore.cli.fsck:command", "Check and mend the files of a disk tier."),
    "bench": ("kvstore.cli.bench:command", "Measure this store on this machine."),
}


class LazyGroup(click.Group):
    """A group that imports a verb's file when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module, _, attribute = VERBS[name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.command(
    cls=LazyGroup, name="kvstore", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(kvstore.__version__, prog_name="kvstore", message="%(prog)s %(version)s")
def group() -> None:
    """Tiered KV-cache storage daemon for LLM inference.

    Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 daemon unreachable.
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; answers with the exit code after printing an error's sentence."""
    try:
        code = group.main(args=arguments, prog_name="kvstore", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 2
    except click.Abort:
        click.echo("kvstore: interrupted", err=True)
        return 130
    except BrokenPipeError:
        # Whoever read us has left; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KVStoreError, click.ClickException, OSError) as error:
        click.echo(f"kvstore: {sentence(error)}", err=True)
        return exit_code(error)
    return code if isinstance(code, int) else 0


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
