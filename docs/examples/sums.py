import re


class Environment:
    """Sums. To 12+34= the model may write (12+34), which gets "46 ", before it answers 46."""

    def reset(self, row):
        self.answer = row["answer"].rpartition(" ")[2]

    def step(self, text):
        call = re.fullmatch(r"\((\d+)\+(\d+)\)", text)
        if call:
            return f"{int(call[1]) + int(call[2])} ", 0.0, False
        return "", float(text == self.answer), True
