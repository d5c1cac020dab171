"""Names of kernels, made fit for a line of a terminal.

They come from files, so they may hold anything: terminal codes, a megabyte of C++ templates.
"""

import re
from collections import Counter
from collections.abc import Sequence

from workshop.errors import printable

ELLIPSIS = "…"
_MOST = 20_000
"""Characters that are looked at: beyond these no name is any clearer."""
_MOST_WORDS = 2
"""Template arguments that are kept: the functor, and what it applies."""

_CALLABLE = re.compile(r"[\w~:]+[<(]")
"""How a C++ function with template arguments or parameters begins. "Memcpy HtoD (Pageable ->
Device)" and "aten::mm" begin otherwise."""
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
_PLACEHOLDER = re.compile(r"T\d+")
"""How ncu writes a template argument that it has named before."""
_MANGLED = re.compile(r"_ZN?(?=[1-9])")
_MANGLED_TOKEN = re.compile(r"L[a-z]n?\d+E|[STU]\d*_|E\d_|(?P<length>[1-9]\d*)")
"""Part of a mangled name: a number, a reference to an earlier part, the number of a lambda, or the
length of the identifier that follows."""
_OPENING, _CLOSING = "<([{", ">)]}"
_LIBRARIES = ("at::native::", "at::cuda::", "at::", "c10::", "std::")

# Template arguments that are in every other name: types, loaders, and wrappers of the functor
# that says what the kernel computes.
_PLAIN = frozenset(
    """
    void bool char int unsigned signed short long float double half true false const auto
    int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t size_t
    BFloat16 Half bfloat16_t half_t complex __half __nv_bfloat16 hip_bfloat16
    Float8_e4m3fn Float8_e5m2
    array Array integral_constant TensorIterator TensorIteratorBase Scalar
    OffsetCalculator TrivialOffsetCalculator
    LoadWithCast LoadWithoutCast StoreWithCast StoreWithoutCast
    lambda instance operator
    gpu_kernel_impl gpu_kernel_impl_nocast opmath_gpu_kernel_with_scalars
    BinaryFunctor AUnaryFunctor BUnaryFunctor func_wrapper_t ReduceOp
    TensorListMetadata TensorListScalarListMetadata FusedOptimizerTensorListMetadata
    at native c10 cuda std memory templates
    """.split()
)


def display_name(name: str, width: int) -> str:
    """A kernel's name in at most `width` characters (at least 1), every one of them printable:
    without the parts that most C++ names share, and cut where it is still too long, though not at
    its ends.

    at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, ...>(int, ...)
    becomes vectorized_elementwise_kernel<AddFunctor>.
    """
    short = _short(printable(name[:_MOST]))
    if len(short) <= width:
        return short
    # Names begin alike, with a library's or a template's name: their ends differ.
    head = width // 3
    tail = width - head - len(ELLIPSIS)
    return short[:head] + ELLIPSIS + short[len(short) - tail :]


def distinct_names(names: Sequence[str], width: int) -> list[str]:
    """The display names of several kernels; those that would be the same are numbered: "#1"."""
    shown = [display_name(name, width) for name in names]
    times, numbers = Counter(shown), Counter[str]()
    for index, short in enumerate(shown):
        if times[short] > 1:
            numbers[short] += 1
            number = f" #{numbers[short]}"
            shown[index] = display_name(names[index], width - len(number)) + number
    return shown


def _short(name: str) -> str:
    if _MANGLED.match(name):
        function, words = _split_mangled(name)
    else:
        plain = _UNNAMED.sub("", name.removeprefix("void "))
        if not _CALLABLE.match(plain):
            return name
        function, arguments = _split(plain)
        for library in _LIBRARIES:
            function = function.removeprefix(library)
        words = [match[0].rsplit("::", 1)[-1] for match in _IDENTIFIER.finditer(arguments)]
    # The first few that say what the kernel computes.
    told = [w for w in dict.fromkeys(words) if w not in _PLAIN and not _PLACEHOLDER.fullmatch(w)]
    shown = f"{function}<{', '.join(told[:_MOST_WORDS])}>" if told else function
    return shown if function else name


def _split_mangled(name: str) -> tuple[str, list[str]]:
    """The function, and the identifiers among its template arguments, of a mangled name, as in
    _ZN2at6native13reduce_kernelILi512E..."""
    identifiers: list[str] = []
    position = _MANGLED.match(name).end()  # type: ignore[union-attr]
    end_of_function = 0
    while match := _MANGLED_TOKEN.search(name, position):
        if not end_of_function and match.start() > position:
            end_of_function = len(identifiers)
        position = match.end()
        if match["length"] and len(match["length"]) < 6:
            position += int(match["length"])
            identifiers.append(name[match.end() : position])
    end = end_of_function or len(identifiers)
    words = [word for word in identifiers[end:] if not word.startswith("_GLOBAL__N")]
    return identifiers[end - 1] if end else "", words


def _split(name: str) -> tuple[str, str]:
    """A C++ function's qualified name, and the text of its template arguments. A return type may
    precede the name, and be a template itself."""
    depth, start, opened = 0, 0, 0
    function = arguments = ""
    for i, c in enumerate(name):
        if c in _OPENING:
            if depth == 0:
                function = function or name[start:i]
                if c == "(":  # the parameters: nothing of interest follows
                    return function, arguments
                opened = i + 1
            depth += 1
        elif c in _CLOSING and name[i - 1 : i] != "-":
            depth = max(0, depth - 1)
            if depth == 0:
                arguments = name[opened:i]
                start = i + 1
        elif c == " " and depth == 0:  # what came before was the return type
            function, arguments, start = "", "", i + 1
    return function or name[start:], arguments
