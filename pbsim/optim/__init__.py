"""Update rules as data: scaling of recipes, learning rates, and the coefficients of every mitigation."""

from pbsim.optim.mitigation import Coefficients, UpdateRule, update_rule
from pbsim.optim.recipe import LearningRate, Recipe, scale_recipe

__all__ = ["Coefficients", "LearningRate", "Recipe", "UpdateRule", "scale_recipe", "update_rule"]
