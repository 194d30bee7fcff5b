"""From a name, "package.module:Class", to a backend."""

from __future__ import annotations

import importlib
import inspect

from retinue.encoder.backend import AnyBackend, VisionEncoderBackend


def load_backend(name: str) -> AnyBackend:
    """Import and construct the backend that ``name``, "package.module:Class", names.

    The class is called without arguments; what it needs, it reads in ``build``. ``ValueError`` says what is
    wrong with the name; what the module or the class itself raises comes through.
    """
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name) or module_name.startswith("."):
        raise ValueError(f'a backend is named "package.module:Class", got {name!r}')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"{name!r}: there is no module {error.name!r}") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, VisionEncoderBackend)):
        raise ValueError(f"{name!r}: {module_name} has no VisionEncoderBackend called {class_name!r}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"{name!r}: {class_name} does not define {missing}")
    return found()
