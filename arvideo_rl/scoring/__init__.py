"""Score videos from files: ``score_videos("videos/", reward="inverse_dynamics")``."""

from arvideo_rl.scoring.pairs import Pairing
from arvideo_rl.scoring.run import Result, score_videos
from arvideo_rl.scoring.settings import ScoreConfig

__all__ = ["Pairing", "Result", "ScoreConfig", "score_videos"]
