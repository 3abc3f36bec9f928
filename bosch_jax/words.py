"""The words that needle keys are made of: an adjective and a noun."""


def _words(text: str) -> tuple[str, ...]:
  return tuple(text.split())


ADJECTIVES = _words(
  """
  amber ancient angry bitter blue bold brave brief bright broad busy calm careful clean
  clever cloudy cold common cool crisp curious damp dark deep distant dry eager early easy empty
  fair famous fast fierce fine firm fresh gentle giant golden grand great green grey happy hard
  heavy hidden hollow honest humble icy idle jolly keen kind large late lazy light lively local
  lonely long loud lucky mild modern narrow neat new noble odd old open pale patient plain polite
  proud public pure quick quiet rare rapid red rich ripe rough round royal rural secret sharp
  short shy silent silver simple slow small smooth soft solid sour square steady steep still
  strange strong sunny sweet swift tall tame tender thick thin tiny tough urban vast violet warm
  weak wide wild wise young
  """
)

NOUNS = _words(
  """
  anchor apple arrow autumn badge bank barn basket beach bear bell bench bird board boat bone book
  bottle box branch bread bridge brush button cabin camel camera candle carpet castle cat chain
  chair cheese church circle city clock cloud coast coat coin corner cotton cow crown cup curtain
  desk diamond doctor dog door dragon dream drum eagle engine farm feather fence field fire fish
  flag floor flower forest fox frog garden gate ghost glass glove goat gold guitar hammer harbor
  hat hill horse hotel house island jacket key king kitchen knife lady lake lamp leaf lemon letter
  library lion machine map market mirror money monkey moon mountain mouse needle nest night ocean
  office onion orange owl paper park pencil piano pillow pilot planet plant pocket queen rabbit
  radio rain ring river road rocket roof rope rose salt school shadow sheep ship shoe shop snow
  soap song spoon star stone storm sugar table teacher temple tiger tower train tree trumpet
  tunnel valley village violin wagon wall water whale wheel window wolf wood yard
  """
)
