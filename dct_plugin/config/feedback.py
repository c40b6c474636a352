"""``dct.data_parallel.feedback``: treatment of gradient entries that are not sent."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .section import Variant, written_short


class FeedbackConfig(Variant):
    """Base class of the kinds of feedback."""

    section_path = "dct.data_parallel.feedback"

    #: Whether each rank keeps what it did not send in a residual.
    keeps_residual: ClassVar[bool] = True
    #: Whether gradients are taken at weights that are displaced by the residual.
    looks_ahead: ClassVar[bool] = False
    #: Density of what owners send back, as a multiple of the density of what they receive.
    server_density: ClassVar[float] = 1.0


class AutoFeedback(FeedbackConfig):
    """The feedback that suits the optimizer. Until the host knows the optimizer it is ``local``."""

    kind: Literal["auto"] = "auto"


class NoFeedback(FeedbackConfig):
    """Entries that are not sent are dropped."""

    keeps_residual = False

    kind: Literal["none"] = "none"


class LocalFeedback(FeedbackConfig):
    """Entries that are not sent are added to the rank's next gradient."""

    kind: Literal["local"] = "local"


class StepAheadFeedback(FeedbackConfig):
    """Local feedback; also, the next gradient is taken at weights that anticipate the residual."""

    looks_ahead = True
    server_density = 3.0

    kind: Literal["step_ahead"] = "step_ahead"


#: Any kind of feedback; its name alone stands for the kind with default settings.
Feedback = Annotated[
    AutoFeedback | LocalFeedback | StepAheadFeedback | NoFeedback,
    Field(discriminator="kind"),
    written_short("kind"),
]
