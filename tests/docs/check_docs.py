#!/usr/bin/env python3
"""Holds what the documents say against the tree: links, anchors, named files, commands, and the length of sources.

    check_docs.py ROOT      prints one line per finding; exit status 0 when there is none

check_docs_test.py feeds it broken trees.
"""

import json
import pathlib
import re
import shlex
import sys

MAX_LINES = 600
SOURCE_SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"}
SKIPPED_FOLDERS = {"build", ".git", ".deps", ".venv", ".cache", "__pycache__"}
# `path/like/this` in the text is held against the tree when it begins with one of these.
TOP_FOLDERS = ("include", "src", "cli", "python", "tests", "bench", "examples", "docs", "data", "scripts", "cmake", ".ci")
SHELL_LANGUAGES = {"sh", "bash", "shell", "console"}

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]^]+\]:\s*<?(\S+?)>?\s*$")
INLINE_CODE = re.compile(r"`([^`]+)`")
FENCE = re.compile(r"^\s*(```+|~~~+)\s*([A-Za-z0-9_+-]*)")


def walk(root):
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED_FOLDERS:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from walk(path)
        elif path.is_file():
            yield path


def split_fences(text):
    """Yields (line number, line, language): language is None outside of fenced blocks."""
    fence = None
    language = None
    for number, line in enumerate(text.splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, language = match.group(1), match.group(2).lower()
            continue
        if fence is not None and match and match.group(1)[0] == fence[0] and len(match.group(1)) >= len(fence):
            fence = None
            continue
        yield number, line, language if fence is not None else None


def anchors_of(text):
    """The anchors a forge makes of the headings."""
    anchors = set()
    for _, line, language in split_fences(text):
        match = re.match(r"^#{1,6}\s+(.*?)\s*#*$", line) if language is None else None
        if not match:
            continue
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match.group(1))
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        unique, n = slug, 0
        while unique in anchors:
            n += 1
            unique = f"{slug}-{n}"
        anchors.add(unique)
    return anchors


def expand_braces(text):
    match = re.search(r"\{([^{}]*,[^{}]*)\}", text)
    if not match:
        return [text]
    return [out for part in match.group(1).split(",") for out in expand_braces(text[: match.start()] + part + text[match.end() :])]


class Checker:
    def __init__(self, root):
        self.root = root
        self.findings = []
        self.num_links = 0
        self.num_commands = 0
        cli = root / "cli"
        self.cli_text = "\n".join(p.read_text() for p in walk(cli) if p.suffix in SOURCE_SUFFIXES) if cli.is_dir() else ""
        self.subcommands = set(re.findall(r"add_subcommand\(\s*\"([^\"]+)\"", self.cli_text))
        presets = root / "CMakePresets.json"
        self.presets = {p["name"] for p in json.loads(presets.read_text())["configurePresets"]} if presets.is_file() else set()

    def found(self, path, number, text):
        self.findings.append(f"{path.relative_to(self.root)}:{number}: {text}")

    def check_link(self, path, number, target):
        if re.match(r"^[a-z][a-z0-9+.-]*:", target):
            return  # another site
        self.num_links += 1
        name, _, anchor = target.partition("#")
        file = path if not name else (self.root / name.lstrip("/") if name.startswith("/") else path.parent / name)
        if not file.exists():
            self.found(path, number, f"link to {target}, which does not exist")
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file.read_text()):
            self.found(path, number, f"link to {target}, which has no such heading")

    def check_named_path(self, path, number, code):
        code = code.strip().removeprefix("./")
        if not code.startswith(tuple(f"{folder}/" for folder in TOP_FOLDERS)) or re.search(r"[\s<>$()=]", code):
            return
        name = re.sub(r":\d+(-\d+)?$", "", code)
        for one in expand_braces(name):
            self.num_links += 1
            if not any(self.root.glob(one.rstrip("/"))):
                self.found(path, number, f"names {one}, which does not exist")

    def check_command(self, path, number, line):
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            return  # the inside of a quoted text over several lines
        while words and (re.match(r"^[A-Za-z_]\w*=", words[0]) or words[0] in ("sudo", "env", "time")):
            words.pop(0)
        if not words:
            return
        program = words[0].removeprefix("./")
        if program.startswith(("scripts/", ".ci/")):
            self.num_commands += 1
            file = self.root / program
            if not file.is_file():
                self.found(path, number, f"runs {program}, which does not exist")
            elif not file.stat().st_mode & 0o111:
                self.found(path, number, f"runs {program}, which is not executable")
            else:
                self.check_options(path, number, program, words[1:], file.read_text())
        elif program.rsplit("/", 1)[-1] == "sluice":
            self.num_commands += 1
            rest = words[1:]
            if rest and not rest[0].startswith("-") and rest[0] not in self.subcommands:
                self.found(path, number, f"runs sluice {rest[0]}, but the command has no such subcommand")
            self.check_options(path, number, "sluice", rest, self.cli_text + "--help --version")
        elif program in ("cmake", "ctest"):
            for option, value in zip(words, words[1:]):
                if option == "--preset":
                    self.num_commands += 1
                    if value not in self.presets:
                        self.found(path, number, f"uses the preset {value}, which CMakePresets.json does not have")
        preset = re.match(r"build/([^/]+)/", program)
        if preset and preset.group(1) not in self.presets:
            self.found(path, number, f"runs {program}, but there is no preset {preset.group(1)}")

    def check_options(self, path, number, program, words, text):
        for word in words:
            option = word.split("=", 1)[0]
            if re.match(r"^--[a-z]", option) and option not in ("--help",) and not re.search(re.escape(option) + r"(?![\w-])", text):
                self.found(path, number, f"gives {option} to {program}, which does not know it")

    def check_markdown(self, path):
        pending = ""
        for number, line, language in split_fences(path.read_text()):
            if language is None:
                for target in LINK.findall(INLINE_CODE.sub("", line)) + REFERENCE.findall(line):
                    self.check_link(path, number, target)
                for code in INLINE_CODE.findall(line):
                    self.check_named_path(path, number, code)
            elif language in SHELL_LANGUAGES:
                if line.rstrip().endswith("\\"):
                    pending += line.rstrip()[:-1] + " "
                    continue
                if language == "console" and not pending and not line.startswith("$ "):
                    continue  # output
                for command in re.split(r"\s(?:&&|\|\||\||;)\s", pending + line.strip()):
                    self.check_command(path, number, command.strip())
                pending = ""

    def run(self):
        readme = self.root / "README.md"
        if not readme.is_file():
            self.findings.append("README.md is missing")
        for path in walk(self.root):
            if path.suffix == ".md":
                self.check_markdown(path)
            elif path.suffix in SOURCE_SUFFIXES and "fixtures" not in path.relative_to(self.root).parts:
                num_lines = path.read_bytes().count(b"\n")
                if num_lines > MAX_LINES:
                    self.found(path, num_lines, f"{num_lines} lines, {MAX_LINES} is the limit")
        return self.findings


def main(arguments):
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    checker = Checker(pathlib.Path(arguments[0]).resolve())
    for finding in checker.run():
        print(finding)
    print(f"{checker.num_links} links and names, {checker.num_commands} commands, {len(checker.findings)} findings")
    return 1 if checker.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
