#include "cpu/normal.h"

#include <cmath>

#include "counter_random.h"

namespace tinyloop::cpu {

namespace {

constexpr double kCut = 0.0013498980316300945267;  // Phi(-3)

template <int kTerms>
double polynomial(const double (&terms)[kTerms], double x) {
  double sum = terms[0];
  for (int i = 1; i < kTerms; ++i) sum = sum * x + terms[i];
  return sum;
}

// ln x for x in (0, 1), to a few units in the last place. Our own, because the C library's differs
// between processors: x = m 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1)).
double natural_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2.0;
    exponent -= 1;
  }
  static constexpr double kArtanh[] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                       1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
  const double s = (m - 1.0) / (m + 1.0);
  return exponent * 0.69314718055994531 + 2.0 * s * polynomial(kArtanh, s * s);
}

// Phi^-1(p), by Wichura's rational approximations (algorithm AS 241, relative error about 1e-16).
// Its third range, beyond 5.4 deviations, is never met here.
double inverse_normal(double p) {
  static constexpr double kA[] = {
      2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
      13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.3871328727963666080};
  static constexpr double kB[] = {
      5226.4952788528545610, 28729.085735721942674, 39307.895800092710610, 21213.794301586595867,
      5394.1960214247511077, 687.18700749205790830, 42.313330701600911252, 1.0};
  static constexpr double kC[] = {7.7454501427834140764e-4, 2.27238449892691845833e-2,
                                  2.4178072517745061177e-1, 1.27045825245236838258,
                                  3.64784832476320460504,   5.7694972214606914055,
                                  4.6303378461565452959,    1.42343711074968357734};
  static constexpr double kD[] = {1.05075007164441684324e-9, 5.475938084995344946e-4,
                                  1.51986665636164571966e-2, 1.4810397642748007459e-1,
                                  6.8976733498510000455e-1,  1.6763848301838038494,
                                  2.05319162663775882187,    1.0};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kA, r) / polynomial(kB, r);
  }
  const double r = std::sqrt(-natural_log(q < 0.0 ? p : 1.0 - p)) - 1.6;
  const double x = polynomial(kC, r) / polynomial(kD, r);
  return q < 0.0 ? -x : x;
}

}  // namespace

// bits of (seed, position, channel) -> u in (0, 1) -> p in (Phi(-3), Phi(3)) -> Phi^-1(p).
void fill_normal(uint64_t seed, int64_t position, int64_t width, float std, float* out) {
  const uint64_t row = counter_row(seed, static_cast<uint64_t>(position));
  for (int64_t c = 0; c < width; ++c) {
    const uint64_t bits = counter_bits(row, static_cast<uint64_t>(c));
    const double u = (static_cast<double>(bits >> 40) + 0.5) * 0x1p-24;
    const double x = inverse_normal(kCut + u * (1.0 - 2.0 * kCut));
    out[c] = static_cast<float>(x) * std;
  }
}

}  // namespace tinyloop::cpu
