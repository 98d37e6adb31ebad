// Where a key lies in a paged cache.
#pragma once
#include "../sequence.h"

struct Place {
  int page, row;  // the page is only set where there are pages
};

// For quotients by the page size without a division.
DEVICE unsigned inverse_of_pages(const Params &p) { return quotient(0xffffffffu, p.page_size); }

// `inverse` is floor((2^32 - 1) / size), and the estimate is the quotient or 1 less.
struct Quotient {
  unsigned page, row;
};
DEVICE Quotient divide_by_pages(unsigned position, unsigned size, unsigned inverse) {
  unsigned page = (unsigned)((unsigned long long)position * inverse >> 32);
  unsigned row = position - page * size;
  if (row >= size) {
    page += 1;
    row -= size;
  }
  return Quotient{page, row};
}

// Of key `key` with the padding before it. The page is loaded from the sequence's table: nothing waits for it before
// its first use.
DEVICE void find_in_pages(Place &place, const GLOBAL int *table, unsigned size, unsigned inverse, unsigned position) {
  Quotient found = divide_by_pages(position, size, inverse);
  place.row = found.row;
  place.page = table[found.page];
}

DEVICE const GLOBAL int *table_of(const Params &p, const Sequence &s) {
  return (const GLOBAL int *)p.page_table + s.batch * p.page_table_batch;
}
