"""``isochunk fit``: from measured steps to a profile."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Annotated

import typer

from isochunk.cli.output import JsonOption, print_json, print_table
from isochunk.core.cost import COEFFICIENTS
from isochunk.core.errors import FitError
from isochunk.core.fit import Fit, fit
from isochunk.core.profile import Profile, save_profile
from isochunk.report.fits import draw_fit

__all__ = ["fit_command", "read_samples", "unexplained"]

_COLUMNS = ("chunk", "history", "seconds")
_UNITS = {"c0": "s a step", "c1": "s a token", "c2": "s a token pair", "c3": "s a history token"}
_SHAKY = 1e4
_MISSED = 0.2  # relative error of a sample that the model does not explain
_SHOWN = 5

Column = list[float]


def fit_command(
    samples: Annotated[Path, typer.Argument(help="CSV with columns chunk,history,seconds and optionally stage.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile file to write.")],
    figure: Annotated[
        Path | None, typer.Option(help="Picture of measured against fitted steps (.svg, .png, .pdf; needs matplotlib).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fit the cost model to measured steps and store it as a profile."""
    stages = read_samples(samples)
    fits = {stage: fit(*columns) for stage, columns in stages.items()}
    if figure is not None:
        draw_fit(figure, {stage: (fits[stage].model, *columns) for stage, columns in stages.items()})
    slowest = max(fits.values(), key=lambda f: f.model.seconds(8192, 8192))
    models = tuple(fits[stage].model for stage in sorted(fits)) if len(fits) > 1 else ()
    save_profile(output, Profile(model=slowest.model, stage_models=models, fit=slowest.as_dict()))
    if json:
        told = {
            str(stage): found.as_dict() | {"unexplained": unexplained(found, stages[stage])}
            for stage, found in fits.items()
        }
        print_json({"profile": str(output), "stages": told})
        return
    for stage, result in sorted(fits.items()):
        _print(f"stage {stage}: " if len(fits) > 1 else "", result)
        _warn(unexplained(result, stages[stage]), len(result.residuals))
    typer.echo(f"wrote {output}" + (f" and {figure}" if figure else ""))


def unexplained(found: Fit, columns: tuple[Column, Column, Column]) -> list[dict[str, float]]:
    """The samples that the model misses by more than `_MISSED`, the worst first."""
    rows = zip(*columns, found.residuals.tolist(), strict=True)
    missed = [
        {"chunk": chunk, "history": history, "seconds": seconds, "fitted_s": seconds * (1 + residual)}
        for chunk, history, seconds, residual in rows
        if abs(residual) > _MISSED
    ]
    return sorted(missed, key=lambda row: -abs(row["fitted_s"] / row["seconds"] - 1))


def _warn(missed: list[dict[str, float]], samples: int) -> None:
    if not missed:
        return
    typer.echo(
        f"warning: the model does not explain {len(missed)} of {samples} samples (more than {_MISSED:.0%} off); "
        "steps may have been cold or disturbed: measure them again, each several times"
    )
    for row in missed[:_SHOWN]:
        typer.echo(
            f"  chunk {row['chunk']:.0f} after {row['history']:.0f}: "
            f"measured {row['seconds']:.4g} s, fitted {row['fitted_s']:.4g} s"
        )
    if len(missed) > _SHOWN:
        typer.echo(f"  and {len(missed) - _SHOWN} more")


def _print(prefix: str, result: Fit) -> None:
    numbers = result.as_dict()
    print_table(
        f"{prefix}{numbers['samples']} samples, residuals median {numbers['residual_median']:.1%}, "
        f"90% below {numbers['residual_p90']:.1%}, worst {numbers['residual_max']:.1%}, "
        f"condition {result.condition:.3g}",
        ["coefficient", "value", "unit"],
        [[name, f"{getattr(result.model, name):.4g}", _UNITS[name]] for name in COEFFICIENTS],
    )
    if result.model.curve is not None:
        typer.echo(
            f"c0 and c1 are the straight line nearest to the measured curve of {len(result.model.curve.tokens)} sizes"
        )
    if result.model.bend is not None:
        bend = result.model.bend
        typer.echo(f"attention costs {bend.factor:.3g} times as much beyond {bend.tokens:.0f} tokens of a prompt")
    if result.undetermined:
        typer.echo(
            f"warning: the samples can't determine {', '.join(result.undetermined)}; "
            "add small and large chunks at small and large history"
        )
    elif result.condition > _SHAKY:
        typer.echo("warning: the coefficients trade against each other; spread chunk and history more")


def read_samples(path: Path) -> dict[int, tuple[Column, Column, Column]]:
    """Columns (chunk, history, seconds) of each stage; stage 0 when the file names none.

    Raises:
        FitError: names the line and column that is wrong.
    """
    stages: dict[int, tuple[Column, Column, Column]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = names
            missing = [name for name in _COLUMNS if name not in names]
            if missing:
                raise FitError(f"{path}: column {missing[0]!r} is missing; expected chunk,history,seconds")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row:
                    raise FitError(f"{where}: more fields than the {len(names)} columns; remove them or name them")
                values = [_number(where, name, row[name]) for name in _COLUMNS]
                stage = _whole(where, "stage", row["stage"]) if "stage" in names else 0
                for name in ("chunk", "history"):
                    _whole(where, name, row[name])
                columns = stages.setdefault(stage, ([], [], []))
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
    except (OSError, UnicodeDecodeError) as error:
        raise FitError(f"can't read {path}: {error}") from error
    if not stages:
        raise FitError(f"{path} holds no samples")
    if sorted(stages) != list(range(len(stages))):
        raise FitError(f"{path}: stages {sorted(stages)} must be numbered from 0 without gaps")
    return stages


def _number(where: str, name: str, text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise FitError(f"{where}: {name} = {text!r} is not a number") from None


def _whole(where: str, name: str, text: str | None) -> int:
    number = _number(where, name, text)
    if math.isfinite(number) and not number.is_integer():
        raise FitError(f"{where}: {name} = {text!r} must be a whole number")
    return int(number) if math.isfinite(number) else 0
