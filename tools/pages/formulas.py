"""The lessons' formulas as MathML, which browsers draw by themselves: no script and no font is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def _i(name: str) -> str:
    return f"<mi>{escape(name)}</mi>"


def _o(sign: str) -> str:
    return f'<mo stretchy="false">{escape(sign)}</mo>'


def _n(number: int) -> str:
    return f"<mn>{number}</mn>"


def _row(*parts: str) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def _sub(base: str, index: str) -> str:
    return f"<msub>{base}{index}</msub>"


def _over(top: str, bottom: str) -> str:
    return f"<mfrac>{top}{bottom}</mfrac>"


def _exp(*inside: str) -> str:
    return _row(_i("exp"), _o("("), *inside, _o(")"))


def _sum(index: str, *inside: str) -> str:
    return _row(f"<munder>{_o('∑')}{_i(index)}</munder>", *inside)


def _block(*parts: str) -> str:
    return f'<math display="block">{_row(*parts)}</math>'


X_I, X_J, M, S = _sub(_i("x"), _i("i")), _sub(_i("x"), _i("j")), _i("m"), _i("s")
SOFTMAX = _block(
    _sub(_i("y"), _i("i")), _o("="), _over(_exp(X_I, _o("−"), M), _sum("j", _exp(X_J, _o("−"), M))), _o(","),
    M, _o("="), f"<munder>{_i('max')}{_i('j')}</munder>", X_J,
)  # fmt: skip
S_A, S_B = _sub(S, _i("a")), _sub(S, _i("b"))
ONLINE = _block(M, _o("="), _i("max"), _o("("), _i("a"), _o(","), _i("b"), _o(")")) + _block(
    S, _o("="), S_A, _exp(_i("a"), _o("−"), M), _o("+"), S_B, _exp(_i("b"), _o("−"), M)
)
DX_J, DY_J = (_row(_i("d"), _sub(_i(name), _i("j"))) for name in ("x", "y"))
Y_J = _sub(_i("y"), _i("j"))
GRADIENT = _block(
    DX_J, _o("="), Y_J, _o("("), DY_J, _o("−"),
    _sum("i", _row(_i("d"), _sub(_i("y"), _i("i"))), _sub(_i("y"), _i("i"))), _o(")"),
)  # fmt: skip
LOSS = _block(
    _i("loss"), _o("="), _i("log"), _sum("j", _exp(X_J, _o("−"), M)), _o("−"), _o("("), _sub(_i("x"), _i("t")),
    _o("−"), M, _o(")"),
) + _block(
    DX_J, _o("="), _over(_row(Y_J, _o("−"), _o("["), _i("j"), _o("="), _i("t"), _o("]")), _i("count")),
)  # fmt: skip
CAUSAL = _block(
    Y_J, _o("="), _over(_exp(X_J, _o("−"), M), _sum("k ≤ q", _exp(_sub(_i("x"), _i("k")), _o("−"), M))),
    _i("  for j ≤ q,  "), _n(0), _i("  else"),
)  # fmt: skip

FORMULAS: Mapping[int, str] = {
    **dict.fromkeys((1, 2, 6), SOFTMAX),
    **dict.fromkeys((7, 9), ONLINE),
    12: GRADIENT,
    13: LOSS,
    14: CAUSAL,
    15: SOFTMAX,
}
