package client

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
)

// ask sends r and returns the answer as a T.
func ask[T any](ctx context.Context, d *daemon, r request) (v T, err error) {
	err = d.do(ctx, r, &v)
	return v, err
}

// get is the request for what is at path.
func get(path string) request { return request{method: http.MethodGet, path: path} }

// copyTo sends r and copies the body of the answer, which may go on for long, to w.
func (d *daemon) copyTo(ctx context.Context, r request, w io.Writer) error {
	resp, err := d.stream(ctx, r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(w, d.followed(ctx, resp.Body))
	return err
}

// maxLine bounds a line of a stream, in bytes.
const maxLine = 1 << 20

// lines yields the lines of r as JSON. The last thing it yields is the error
// that ended it, if one did.
func lines[T any](r io.Reader, of string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		sc := bufio.NewScanner(r)
		sc.Buffer(nil, maxLine)
		for sc.Scan() {
			var v T
			if err := json.Unmarshal(sc.Bytes(), &v); err != nil {
				yield(none, fmt.Errorf("decode a line of the %s: %w", of, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
		if err := sc.Err(); err != nil {
			yield(none, err)
		}
	}
}

// pages asks for page after page of a list until there is no other. Pages shift when
// things come and go between two requests, so items whose id came before are left out.
func pages[T any](
	query url.Values, id func(T) string, fetch func(query url.Values) (items []T, p wire.Pagination, err error),
) (all []T, err error) {
	query.Set("pageSize", "200")
	seen := map[string]bool{}
	for page := 1; ; page++ {
		query.Set("page", strconv.Itoa(page))
		items, p, err := fetch(query)
		if err != nil {
			return nil, err
		}
		for _, v := range items {
			if !seen[id(v)] {
				seen[id(v)] = true
				all = append(all, v)
			}
		}
		if !p.HasNextPage || len(items) == 0 {
			return all, nil
		}
	}
}
