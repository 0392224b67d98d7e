"""Delimiters: finds where a delimiter of a response template may begin, so that other text need not be given to the parser.

Each delimiter is a regular expression. Its parse tree tells with which texts a match can begin (the prefixes). A search for these
prefixes takes a fraction of a microsecond, but the parser takes several microseconds for each piece of text.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Search = Callable[..., re.Match[str] | None]
"""Finds the leftmost place where a delimiter may begin. If a whole prefix was found, `lastindex` of the match is not None;
otherwise the match is only the beginning of a prefix, and it ends where the text ends."""

MAX_PREFIXES = 64
MAX_PREFIX_CHARACTERS = 64

_parser: Any = importlib.import_module("re._parser")  # the parser of `re`, which is not public
_UNLIKE_RE = re.compile(r"(?<!\\)(?:\\\\)*(?:\{(?!\d*(?:,\d*)?\})[\s\d]*[<eids]|\[\[|\[:)")
"""Matches syntax that the package `regex`, which compiles the templates, may read in another way than `re`: fuzzy matching, and sets in sets."""


def delimiter_searches(template: Any, *, held: str) -> Mapping[str | None, Search | None]:
    """Return how to find the delimiters that matter in each region of a compiled response template.

    The parser gets all text of the region `held` when this region ends. Of other regions, it gets only the delimiters.

    Returns:
        The search for each region, by the region's name. The name None stands for the text outside all regions. The search is
        None if any text may begin a delimiter, so that the parser has to get all text of the region.
    """
    fields = template.fields.values()
    begins = [(field.open_literals, field.open_re) for field in fields if field.open_re is not None]
    found: dict[str | None, Search | None] = {None: _search(begins, gets_all=False)}
    for field in fields:
        ends = [(field.close_literals, field.close_re)] if field.close_re is not None else []
        watched = begins + ends if field.name == template.implicit else ends
        found[field.name] = _search(watched, gets_all=field.name == held)
    patterns = [pattern for field in fields for pattern in (field.open_re, field.close_re) if pattern is not None]
    if template.implicit is None and not all(_Prefixes(pattern.pattern).are_independent for pattern in patterns):
        # Some delimiter of this template may depend on the text before it. So this module cannot tell which text outside of
        # regions the parser holds back, and which text it drops. Therefore the parser gets all text.
        return dict.fromkeys(found)
    return found


def _search(delimiters: Iterable[tuple[list[str] | None, Any]], *, gets_all: bool) -> Search | None:
    """Return a function that searches for delimiters; None if the parser has to get all text.

    A delimiter is a pair: its literals, or None if it has none, and its compiled regular expression.

    If `gets_all` is true, the parser gets all text of the region when the region ends. Only then may a delimiter depend on the
    text before it.
    """
    alternatives = []
    for literals, pattern in delimiters:
        if literals is not None:
            alternatives.append(_one_of([literal[:MAX_PREFIX_CHARACTERS] for literal in literals]))
            continue
        prefixes = _Prefixes(pattern.pattern)
        if prefixes.texts is None or not (gets_all or prefixes.are_independent):
            return None
        if prefixes.texts:
            flag = "i" if prefixes.ignore_case else ""
            alternatives.append(f"(?{flag}:{_one_of(prefixes.texts)})")
    return re.compile("|".join(alternatives) or "(?!)").search


def _one_of(texts: Iterable[str], *, at_start: bool = True) -> str:
    """Return a regular expression that matches the longest of `texts` or, at the end of the searched text, the beginning of one.

    A match has a group only if it is one of `texts` as a whole.
    """
    following: dict[str, list[str]] = {}
    for text in texts:
        following.setdefault(text[:1], []).append(text[1:])
    is_whole = following.pop("", None) is not None
    longer = [re.escape(character) + _one_of(rest, at_start=False) for character, rest in following.items()]
    otherwise = ["()"] if is_whole else [] if at_start else [r"\Z"]
    return f"(?:{'|'.join(longer + otherwise)})"


def may_never_end(opening: Any, closing: Any) -> bool:
    """Return whether a region may open and close again and again at one place, so that the parser would never end.

    Args:
        opening: Compiled regular expression that opens the region.
        closing: Compiled regular expression that closes it.
    """
    patterns = (opening, closing)
    return all(map(_can_be_empty, patterns)) or all(map(_can_be_empty_at_newline, patterns))


def _can_be_empty(pattern: Any, *, at_newline: bool = False) -> bool:
    """Return whether a compiled regular expression may match empty text before the end of the text, or True if this is unknown."""
    tree = _parsed(pattern.pattern)
    # If `re` does not read an expression, such as (?=\p{L}), the answer is True, because tests with sample texts could
    # not prove that the expression never matches empty text.
    return tree is None or _is_empty(tree, at_newline=at_newline)


def _can_be_empty_at_newline(pattern: Any) -> bool:
    """Return whether a compiled regular expression may match empty text before a newline, as the expression $ does."""
    if not _can_be_empty(pattern, at_newline=True):
        return False
    return not _Prefixes(pattern.pattern).are_independent or pattern.match("\n", partial=True) is not None


def _parsed(pattern: str) -> Any:
    """Return the parse tree of a regular expression; None if `re` does not read it as `regex` does."""
    if _UNLIKE_RE.search(pattern) is not None:
        return None
    try:
        return _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return None


def _is_empty(tree: Any, *, at_newline: bool) -> bool:
    """Return whether a sequence of parse tree nodes may match empty text before the end of the text.

    Args:
        tree: The nodes.
        at_newline: True if a newline follows, so that the expression $ may match as well.
    """
    is_empty = functools.partial(_is_empty, at_newline=at_newline)
    for operation, value in tree:
        match str(operation):
            case "AT" if str(value) == "AT_END_STRING" or (str(value) == "AT_END" and not at_newline):
                return False
            case "BRANCH" if not any(map(is_empty, value[1])):
                return False
            case "SUBPATTERN" if not is_empty(value[3]):
                return False
            case "ATOMIC_GROUP" if not is_empty(value):
                return False
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT" if value[0] and not is_empty(value[2]):
                return False
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return False
            case _:
                pass
    return True


class _Prefixes:
    """The prefixes of a regular expression: each of its matches begins with one of them.

    Attributes:
        texts: The prefixes, none of which is empty; None if they cannot be determined, so that a match may begin anywhere.
        ignore_case: True if upper and lower case match each other.
        are_independent: True if no match depends on the text before it, as `^` or a lookbehind does. False also if the pattern
            cannot be parsed.
    """

    def __init__(self, pattern: str) -> None:
        self.texts: Sequence[str] | None = None
        self.ignore_case = False
        self.are_independent = True
        if (tree := _parsed(pattern)) is None:
            self.are_independent = False
            return
        self.ignore_case = bool(tree.state.flags & re.IGNORECASE)
        found = self._extended([("", True)], tree)
        texts = list(dict.fromkeys(text for text, _ in found))
        if all(texts) and not (self.ignore_case and not "".join(texts).isascii()):
            self.texts = texts

    def _extended(self, prefixes: list[tuple[str, bool]], tree: Any) -> list[tuple[str, bool]]:
        """Return the prefixes after a sequence of parse tree nodes, each with a flag that tells whether it can be extended."""
        for operation, value in tree:
            ended = [each for each in prefixes if not each[1]]
            growing = [each for each in prefixes if each[1]]
            prefixes = ended + self._step(growing, str(operation), value)
            if len(prefixes) > MAX_PREFIXES:
                prefixes = ended + [(text, False) for text, _ in growing]
        return prefixes

    def _step(self, growing: list[tuple[str, bool]], operation: str, value: Any) -> list[tuple[str, bool]]:
        """Return the prefixes that result if each of `growing` is extended by one node of the parse tree; flags are as in `_extended`."""
        if operation == "LITERAL":
            return [(text + chr(value), len(text) + 1 < MAX_PREFIX_CHARACTERS) for text, _ in growing]
        if operation == "IN" and all(str(kind) == "LITERAL" for kind, _ in value):
            return [each for _, code in value for each in self._step(growing, "LITERAL", code)]
        if operation == "BRANCH":
            return [each for branch in value[1] for each in self._extended(growing, branch)]
        if operation == "SUBPATTERN":
            self.ignore_case |= bool(value[1] & re.IGNORECASE)
            return self._extended(growing, value[3])
        if operation == "ATOMIC_GROUP":
            return self._extended(growing, value)
        if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, tree = value
            once = self._extended(growing, tree)
            once = once if least == most == 1 else [(text, False) for text, _ in once]
            return once if least else growing + once
        if operation == "AT":
            is_end = str(value) in ("AT_END", "AT_END_STRING")
            self.are_independent &= is_end
            if str(value) == "AT_END_STRING":  # drop empty prefixes: the parser notices the end of the answer itself
                growing = [each for each in growing if each[0]]
            return [(text, False) for text, _ in growing] if is_end else growing
        if operation in ("ASSERT", "ASSERT_NOT"):
            self.are_independent &= value[0] > 0
            self._extended([], value[1])  # only sets `are_independent`; the prefixes are not needed
            return growing
        if operation == "GROUPREF_EXISTS":
            for branch in value[1:]:
                self._extended([], branch or [])
        return [(text, False) for text, _ in growing]
