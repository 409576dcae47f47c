"""What Open-Sora 1.2 adds to a prompt, and how it cleans a prompt before T5 reads it.

The authors clean prompts as PixArt does, twice in a row. These rules are written from what that cleaning does. Text in
a wrong encoding is the one thing that it repairs and these leave.
"""

import html
import re
import unicodedata
from html.parser import HTMLParser
from urllib.parse import unquote_plus

_SCORES = ("aesthetic score", "motion score")
_CAMERA = "camera motion"

_SUFFIXES = "png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_ADDRESS = r"[a-z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_DASHES = "\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"  # noqa: E501
_DOUBLE_QUOTES, _SINGLE_QUOTES = "`\u00b4\u00ab\u00bb\u201c\u201d\u00a8", "\u2018\u2019"

_Rules = tuple[tuple[str, str], ...]

_BEFORE_MARKUP: _Rules = (
    ("<person>", "person"),
    (rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_ADDRESS})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_ADDRESS})", ""),
)
"""Addresses of pages."""

_SIGNS: _Rules = (
    (r"@\w+\b", ""),  # names of accounts
    ("[\u31c0-\u9fff]+", ""),  # ideographs
    (f"[{_DASHES}]+", "-"),
    (f"[{_DOUBLE_QUOTES}]", '"'),
    (f"[{_SINGLE_QUOTES}]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # addresses of machines
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.(?:{_SUFFIXES})", ""),  # names of files
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)

_WORDS: _Rules = (
    (r"\b[a-z]{1,3}\d{3,15}\b", ""),
    (r"\b[a-z]+\d+[a-z]+\b", ""),
    (r"\b\d+[a-z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b(?:{_SUFFIXES})(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-z]+\d+[a-z]+\d+[a-z\d]*\b", " "),
    ("\\b\\d+\\.?\\d*[x\u0445\u00d7]\\d+\\.?\\d*\\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
"""Numbers of articles, advertisements and sizes."""

_ENDS: _Rules = (
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)

_UNUSUAL = "[\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06\u3000\uff01-\uffef]"
"""Letters that are two, and letters of another width."""

_MOST_JOINED = 3
"""Words joined by more dashes and underscores than this are separated."""


class _Text(HTMLParser):
    """Collects what a page shows."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.shown: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Hide programs and styles."""
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        """See ``handle_starttag``."""
        self._hidden -= tag in ("script", "style") and self._hidden > 0

    def handle_data(self, data: str) -> None:
        """Keep text."""
        if not self._hidden:
            self.shown.append(data)


def with_scores(prompt: str, *, aesthetic: float | None, motion: float | None, camera: str) -> str:
    """Return a prompt with what the model was trained on at its end.

    Args:
        aesthetic: the aesthetic score; None for none.
        motion: the motion score; None for none.
        camera: how the camera moves; "" to leave it open.
    """
    for name, score in zip(_SCORES, (aesthetic, motion), strict=True):
        if score is not None and f"{name}:" not in prompt:
            prompt = f"{prompt} {name}: {score:.1f}."
    return f"{prompt} {_CAMERA}: {camera}." if camera and f"{_CAMERA}:" not in prompt else prompt


def cleaned(prompt: str) -> str:
    """Return a prompt as the model was trained on it: in lower case, without addresses, markup and odd signs."""
    return _clean(_clean(prompt))


def _clean(prompt: str) -> str:
    text = _apply(_BEFORE_MARKUP, unquote_plus(prompt).strip().lower())
    page = _Text()
    page.feed(text)
    page.close()
    text = _apply(_SIGNS, "".join(page.shown))
    joints = re.compile("[-_]")
    if len(joints.findall(text)) > _MOST_JOINED:
        text = joints.sub(" ", text)
    text = html.unescape(html.unescape(_with_plain_letters(text)))
    return _apply(_ENDS, _apply(_WORDS, text, re.IGNORECASE).strip()).strip()


def _with_plain_letters(text: str) -> str:
    """Return a text with plain quotes, composed accents, and separate letters of usual width."""
    for quotes, plain in (("[\u02bc\u2018-\u201b]", "'"), ("[\u201c-\u201f]", '"')):
        text = re.sub(quotes, plain, text)
    text = re.sub(_UNUSUAL, lambda found: unicodedata.normalize("NFKC", found[0]), text)
    return unicodedata.normalize("NFC", text)


def _apply(rules: _Rules, text: str, flags: int = 0) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text, flags=flags)
    return text
