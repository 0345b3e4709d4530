package store

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// A policyShelf keeps named policies.
type policyShelf struct {
	w           *committer
	policies    map[string]record.Policy // by name; guarded by w.mu, as the next
	badPolicies map[string]error
}

// PutPolicy makes v, whose Number it sets, the newest version of a policy, and the policy
// fixed or not. A version like the newest one changes nothing. It returns the policy as it
// then is, and as it was: without versions if it is new. A record that cannot be read is
// replaced; its numbers go on behind those that sandboxes have. Beyond record.MaxPolicyBytes
// the policy loses its oldest versions. It fails with errs.Exhausted if that is not enough,
// and beyond record.MaxPolicies.
func (s *policyShelf) PutPolicy(ctx context.Context, name string, fixed bool, v record.PolicyVersion) (p, was record.Policy, err error) {
	v.Network = v.Network.Clone()
	err = s.w.commit(ctx, func(tx *bbolt.Tx) error {
		last := 0
		var ok bool
		if was, ok, err = getPolicy(tx, name); err != nil {
			ok, was = false, record.Policy{}
			if last, err = lastUsed(tx, name); err != nil {
				return err
			}
		} else if !ok {
			if n := tx.Bucket(bucketPolicies).Stats().KeyN; n >= record.MaxPolicies {
				return refusal{errs.New(errs.Exhausted, "this host has its maximum of %s; delete some (`sandboxctl policy rm`)",
					errs.Count(n, "policy", "policies"))}
			}
		}
		p = record.Policy{Name: name, Fixed: fixed, Created: v.Made, Versions: slices.Clone(was.Versions)}
		if ok {
			p.Created = was.Created
		}
		if !ok || !was.Newest().Same(v) {
			if ok {
				last = was.Newest().Number
			}
			v.Number = last + 1
			p.Versions = append(p.Versions, v)
			p.Versions = p.Versions[max(0, len(p.Versions)-record.PolicyVersions):]
		}
		return putPolicy(tx, &p)
	}, func() {
		s.policies[name] = p
		delete(s.badPolicies, name)
	})
	if err != nil {
		return p, was, fmt.Errorf("put policy %s: %w", name, err)
	}
	return p, was, nil
}

// DeletePolicy removes a policy, whose record may be unreadable. It fails with
// errs.NotFound if there is none, and with errs.WrongState, which names them, while
// sandboxes use it, whatever their state.
func (s *policyShelf) DeletePolicy(ctx context.Context, name string) error {
	err := s.w.commit(ctx, func(tx *bbolt.Tx) error {
		policies := tx.Bucket(bucketPolicies)
		if policies.Get([]byte(name)) == nil {
			return noPolicy(name)
		}
		used, err := policyUsers(tx, name)
		if err != nil {
			return err
		}
		if len(used) > 0 {
			return refusal{errs.Wire(errs.New(errs.WrongState, "policy %s is in use by %s: delete them, also those that have ended, or "+
				"give them another policy (`sandboxctl egress set`) while they run or are paused", name, clipped(used)), "POLICY::IN_USE")}
		}
		return policies.Delete([]byte(name))
	}, func() {
		delete(s.policies, name)
		delete(s.badPolicies, name)
	})
	if err != nil {
		return fmt.Errorf("delete policy %s: %w", name, err)
	}
	return nil
}

// Policy returns a policy by its name, unless it cannot be read.
func (s *policyShelf) Policy(_ context.Context, name string) (p record.Policy, ok bool, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	p, ok = s.policies[name]
	return p, ok, nil
}

// Policies returns all policies, by name, and the names of those that cannot be read.
// They are shared and never change.
func (s *policyShelf) Policies(context.Context) (all []record.Policy, unreadable []string, err error) {
	s.w.mu.RLock()
	defer s.w.mu.RUnlock()
	for _, name := range slices.Sorted(maps.Keys(s.policies)) {
		all = append(all, s.policies[name])
	}
	return all, slices.Sorted(maps.Keys(s.badPolicies)), nil
}

func noPolicy(name string) error {
	return refusal{errs.Wire(errs.New(errs.NotFound, "no policy %q; `sandboxctl policy ls` lists the policies of this host", name),
		"POLICY::NOT_FOUND")}
}

func unreadablePolicy(name string, err error) error {
	return errs.Wrap(err, errs.Internal, "the record of policy %s cannot be read; the sandboxes that use it keep what they have; set "+
		"it again (`sandboxctl policy set %s`)", name, name)
}

// claimPolicy gives r the version that it names of a policy. It writes nothing.
func claimPolicy(tx *bbolt.Tx, r *record.Record) error {
	use := &r.Spec.Policy
	if !use.Uses(use.Name) {
		return nil
	}
	p, ok, err := getPolicy(tx, use.Name)
	if err != nil {
		return refusal{err}
	}
	if !ok {
		return noPolicy(use.Name)
	}
	wanted := 0
	if use.Pinned {
		wanted = use.Version
	}
	v, ok := p.Version(wanted)
	if !ok {
		return refusal{errs.Wire(errs.New(errs.NotFound, "policy %s has no version %d; the versions %d to %d are kept", use.Name,
			use.Version, p.Versions[0].Number, p.Newest().Number), "POLICY::NOT_FOUND")}
	}
	use.Version = v.Number
	r.Spec.Network, r.Spec.NetworkPolicy = v.Network, v.NetworkPolicy
	r.Spec.Inspect = r.Spec.Inspect || v.Network.AboutRequests()
	return nil
}

// lastUsed is the highest version of a policy that any sandbox has.
func lastUsed(tx *bbolt.Tx, name string) (last int, err error) {
	err = tx.Bucket(bucketBoxes).ForEach(func(_, b []byte) error {
		var r record.Record
		if json.Unmarshal(b, &r) == nil && r.Spec.Policy.Name == name {
			last = max(last, r.Spec.Policy.Version)
		}
		return nil
	})
	return last, err
}

// policyUsers lists the sandboxes that use a policy. One that is being deleted does not
// come back, so it does not count; an unreadable record that has the name counts.
func policyUsers(tx *bbolt.Tx, name string) (ids []string, err error) {
	needle := []byte(`"policy":{"name":"` + name + `"`)
	err = tx.Bucket(bucketBoxes).ForEach(func(k, b []byte) error {
		if !bytes.Contains(b, needle) {
			return nil
		}
		var r record.Record
		if err := json.Unmarshal(b, &r); err != nil || r.State != record.Deleting && r.Spec.Policy.Uses(name) {
			ids = append(ids, string(k))
		}
		return nil
	})
	return ids, err
}

func getPolicy(tx *bbolt.Tx, name string) (p record.Policy, ok bool, err error) {
	b := tx.Bucket(bucketPolicies).Get([]byte(name))
	if b == nil {
		return p, false, nil
	}
	if err := readPolicy(name, b, &p); err != nil {
		return p, true, unreadablePolicy(name, err)
	}
	return p, true, nil
}

func readPolicy(name string, b []byte, p *record.Policy) error {
	err := json.Unmarshal(b, p)
	if err == nil && (p.Name != name || len(p.Versions) == 0) {
		err = fmt.Errorf("it contains the record of policy %q with %d versions", p.Name, len(p.Versions))
	}
	return err
}

// putPolicy writes a policy. While all would take more than they may, it drops the oldest
// versions of p: a policy must never be too large to be tightened. It refuses p if the
// newest version alone does not fit.
func putPolicy(tx *bbolt.Tx, p *record.Policy) error {
	b, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	bucket, others := tx.Bucket(bucketPolicies), 0
	err = bucket.ForEach(func(k, v []byte) error {
		if string(k) != p.Name {
			others += len(v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	dropped := 0
	for ; others+len(b)-dropped > record.MaxPolicyBytes && len(p.Versions) > 1; p.Versions = p.Versions[1:] {
		old, err := json.Marshal(p.Versions[0])
		if err != nil {
			return fmt.Errorf("encode: %w", err)
		}
		dropped += len(old) + len(",")
	}
	if dropped > 0 {
		if b, err = json.Marshal(p); err != nil {
			return fmt.Errorf("encode: %w", err)
		}
	}
	if others+len(b) > record.MaxPolicyBytes {
		return refusal{errs.New(errs.Exhausted, "policy %s would take %.1f MiB without its older versions, and others take %.1f MiB; all "+
			"policies of this host may take %d MiB: give it fewer rules, such as ranges in the place of addresses, or delete others "+
			"(`sandboxctl policy rm`)", p.Name, mebibytes(len(b)), mebibytes(others), record.MaxPolicyBytes>>20)}
	}
	return bucket.Put([]byte(p.Name), b)
}

func mebibytes(n int) float64 { return float64(n) / (1 << 20) }

// loadPolicies reads every record. It reports and keeps one that cannot be read.
func (s *policyShelf) loadPolicies(tx *bbolt.Tx, log *slog.Logger) error {
	return tx.Bucket(bucketPolicies).ForEach(func(k, b []byte) error {
		var p record.Policy
		name := string(k)
		if err := readPolicy(name, b, &p); err != nil {
			s.badPolicies[name] = err
			log.Error("the record of a policy cannot be read; the sandboxes that use it keep what they have", "policy", name, "err", err)
			return nil
		}
		s.policies[name] = p
		return nil
	})
}
