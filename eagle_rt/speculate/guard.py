"""The last word on whether drafts pay: what they have really gained."""

# While steps draft, one in so many does not, fewer where drafts clearly pay; drafts that gain less than steps without
# them over so many steps are stopped for a while, which doubles while they go on failing.
DRAFTS_A_PLAIN_STEP, DRAFTS_A_PLAIN_STEP_WHERE_CLEAR, CLEAR_GAIN = 16, 64, 1.1
GUARD_MEMORY, NUM_JUDGED, LEAST_GAIN, FIRST_BAN, LONGEST_BAN = 0.98, 16, 0.92, 64, 1024
# So many steps without drafts are a pause.
PAUSE = 8


class Guard:
    """Compares what steps with and without drafts have really gained, and stops drafts that the estimates are wrong about."""

    def __init__(self) -> None:
        self._sums = {True: [0.0, 0.0], False: [0.0, 0.0]}
        self._num_drafted = 0  # since they were judged
        self._since_plain, self._since_drafted = DRAFTS_A_PLAIN_STEP - 4, 0
        self._num_banned, self._ban = 0, FIRST_BAN

    def saw(self, drafted: bool, tokens: float, ms: float) -> None:
        """What a step gained, in what time. Both kinds are remembered for as long, since machines are slower and faster from minute
        to minute; drafts after a pause are judged by themselves: those of before were for other texts."""
        if drafted and self._since_drafted >= PAUSE:
            self._sums[True], self._num_drafted = [0.0, 0.0], 0
        self._sums = {kind: [GUARD_MEMORY * value for value in sums] for kind, sums in self._sums.items()}
        self._sums[drafted][0] += tokens
        self._sums[drafted][1] += ms
        self._num_drafted += drafted
        self._since_plain, self._since_drafted = (self._since_plain + 1, 0) if drafted else (0, self._since_drafted + 1)

    def gain(self) -> float | None:
        """Speed with drafts over speed without, as far as both are known."""
        (drafted, drafted_ms), (plain, plain_ms) = self._sums[True], self._sums[False]
        return drafted / drafted_ms * plain_ms / plain if drafted_ms and plain else None

    def allows_drafts(self) -> bool:
        """Asked once for every step that would draft."""
        if self._num_banned:
            self._num_banned -= 1
            return False
        gain = self.gain()
        is_clear = gain is not None and gain > CLEAR_GAIN
        if self._since_plain >= (DRAFTS_A_PLAIN_STEP_WHERE_CLEAR if is_clear else DRAFTS_A_PLAIN_STEP):
            return False
        if gain is not None and self._num_drafted >= NUM_JUDGED:
            self._num_drafted = 0
            if gain < LEAST_GAIN:
                self._num_banned, self._ban = self._ban, min(LONGEST_BAN, 2 * self._ban)
                self._sums[True] = [0.0, 0.0]
                return False
            self._ban = FIRST_BAN
        return True
