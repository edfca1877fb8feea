"""Changes to Triton's interpreter: it refuses products that a GPU has not, and wastes less time.

A launch replaces functions of `triton.language` by the interpreter's, and so does every call of a `triton.jit` function
from the kernel: a third of the time of interpreted kernels, although nothing is left to be replaced.
"""


def replace_language_once_a_launch() -> None:
    from triton.runtime import interpreter

    replace, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    replaced = set()  # names of those of the modules that the launch under way has replaced functions of

    class Scope:
        """Of a launch, or of a call within it, which has nothing to restore."""

        def __init__(self, scope=None):
            self.scope = scope

        def restore(self) -> None:
            if self.scope is not None:
                self.scope.restore()
                replaced.clear()

    def replace_once(function):
        seen = {module.__name__ for module in function.__globals__.values() if any(module is m for m in language)}
        if seen and seen <= replaced:
            return Scope()
        is_launch = not replaced
        replaced.update(seen)
        scope = replace(function)
        return Scope(scope) if is_launch else scope

    interpreter._patch_lang = replace_once


def refuse_what_gpus_do_not_multiply() -> None:
    """Products that sum over less than 16 numbers: no GPU compiles them, the interpreter takes any."""
    from triton.runtime import interpreter

    interpreter.interpreter_builder.codegen_fns["min_dot_size"] = lambda left, right: (1, 1, 16)
