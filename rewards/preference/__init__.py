"""Rewards learned from what people prefer: CLIP-like scores of frames, VideoReward, and any judge behind HTTP."""
