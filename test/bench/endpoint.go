package main

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
)

// server answers two bytes to everything.
const server = `require("http").createServer((q, s) => s.end("ok")).listen(Number(process.argv[1]), process.argv[2])`

// nodeEndpoint: requests for a second to a server of node in a sandbox, by ab on the host
// with 20 connections, against the same server on the host.
func nodeEndpoint(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		if err := b.nodeEndpointOn(ctx, rt); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) nodeEndpointOn(ctx context.Context, rt string) (err error) {
	id, err := b.roomy(ctx, rt)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.drop(ctx, id)) }()
	host, end, err := b.outside(ctx, id)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	in, err := b.cl.Inspect(ctx, id)
	if err != nil {
		return err
	}
	local, err := freePort()
	if err != nil {
		return err
	}
	var rates [2]func() (float64, error)
	for i, s := range []struct {
		place
		address string
	}{{b.inside(id), net.JoinHostPort(in.Host["address"], strconv.Itoa(guestPort))}, {host, local}} {
		ip, port, err := net.SplitHostPort(s.address)
		if err != nil {
			return err
		}
		stop, err := s.start(ctx, "node", "-e", server, port, ip)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
		if err := (site{"http://" + s.address, &http.Client{}}).await(ctx); err != nil {
			return err
		}
		rates[i] = func() (float64, error) {
			said, err := host.run(ctx, "ab", "-q", "-k", "-c", "20", "-t", "1", "-n", "1000000", "http://"+s.address+"/")
			if err != nil {
				return 0, err
			}
			return after("Requests per second:")(said)
		}
	}
	a, c, err := turns(b.times(6, 1), 1, rates[0], rates[1])
	if err != nil {
		return err
	}
	b.add(row("node_endpoint", rt, "1/s", a, "the same server on the host", c, goal{}))
	return nil
}
