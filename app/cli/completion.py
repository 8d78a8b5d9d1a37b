"""`shoal completion bash|zsh|fish`: a completion script for the shell, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from app.cli.command import Command

Tree = Mapping[str, tuple[str, Sequence[str]]]  # command -> its help, and the options and choices that may follow it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=tuple(SCRIPTS), help='for bash: eval "$(shoal completion bash)"')


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    from app.cli import build_parser
    from app.cli.registry import all_commands

    print(SCRIPTS[arguments.shell](tree_of(build_parser(all_commands()))), end="")
    return 0


def tree_of(parser: argparse.ArgumentParser) -> Tree:
    """Return the commands of a parser, with the help, options and choices of each."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    return {name: (helps.get(name, ""), _words(child)) for name, child in commands.choices.items()}


def _words(parser: argparse.ArgumentParser) -> list[str]:
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    choices = [str(one) for action in parser._actions if not action.option_strings for one in action.choices or ()]
    return [*choices, *options]


def bash_script(tree: Tree) -> str:
    """Return the script for bash; file names complete if no word does."""
    cases = "\n".join(f'        {name}) words="{" ".join(words)}" ;;' for name, (_, words) in tree.items())
    return f"""_shoal() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words="" command="" at
    for ((at = 1; at < COMP_CWORD; at++)); do
        case "${{COMP_WORDS[at]}}" in
        --home) ((at++)) ;;
        -*) ;;
        *) command="${{COMP_WORDS[at]}}"; break ;;
        esac
    done
    case "$command" in
        "") words="{" ".join(tree)} --home --version --help" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _shoal shoal
"""


def zsh_script(tree: Tree) -> str:
    """Return the script for zsh."""
    cases = "\n".join(f"        {name}) found=({' '.join(words)}) ;;" for name, (_, words) in tree.items())
    return f"""#compdef shoal
_shoal() {{
    local -a found
    local command="" at
    for ((at = 2; at < CURRENT; at++)); do
        case "${{words[at]}}" in
        --home) ((at++)) ;;
        -*) ;;
        *) command="${{words[at]}}"; break ;;
        esac
    done
    case "$command" in
        "") found=({" ".join(tree)} --home --version --help) ;;
{cases}
    esac
    compadd -- $found
    _files
}}
compdef _shoal shoal
"""


def fish_script(tree: Tree) -> str:
    """Return the script for fish."""
    lines = ["complete -c shoal -n __fish_use_subcommand -f"]
    for name, (help, words) in tree.items():
        text = help.replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c shoal -n __fish_use_subcommand -a {name} -d '{text}'")
        under = f"complete -c shoal -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{under} -l {word[2:]}" if word.startswith("--") else f"{under} -a {word}" for word in words]
    return "\n".join(lines) + "\n"


SCRIPTS: Mapping[str, Callable[[Tree], str]] = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}

COMMANDS = (Command("completion", "print a completion script for a shell", run_completion, add_arguments),)
